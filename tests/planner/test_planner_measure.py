"""Hardware files that are measured here, and what is fitted to measurements."""

import math
import random
import re
import time

import pytest
import torch

from weft.cli.main import main
from weft.config.run import RunConfig
from weft.planner import measure
from weft.planner import measure_links as links
from weft.planner.communication import Group, Links
from weft.planner.hardware import load_hardware
from weft.planner.hardware_files import add_links, write_hardware
from weft.planner.measure import DeviceMeasurement
from weft.planner.measure_links import GroupSize, LinkMeasurement, fit_line, fitted_levels, group_sizes, groups_of
from weft.planner.measured_device import device_tree, fit_products, run_operators
from weft.planner.step import predict

RUN = """
model: {vocab_size: 64, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 96}
data: {sequence_length: 16}
training: {steps: 10, batch_tokens: 128, micro_batch_size: 4, dtype: float32}
"""


def guessed(hardware):
    """The keys of a hardware file whose numbers are guesses, by its `source`."""
    return [key for key, text in hardware.source.items() if text.startswith("a guess")]


def machine(**others) -> dict:
    """A hardware file of this machine with made-up measurements."""
    found = DeviceMeasurement(
        products={"float32": {512: 2 * 512**3 / 1e11}},
        peaks={"float32": 1e11},
        attention=5e10,
        bandwidth=1e10,
        elementwise=8e9,
        launch=2e-6,
        to_device=9e9,
        **others,
    )
    return device_tree(found, torch.device("cpu"), 2, "2026-11-23")


def test_rates_of_products_are_found_again():
    """float32 reaches 0.8 of 100 GFLOP/s and bfloat16 0.5 of 400, each half of that at size 200."""

    def seconds(rate: float) -> dict[int, float]:
        return {size: 2 * size**3 / (rate * size / (size + 200)) for size in (128, 256, 512, 1024)}

    peaks = {"float32": 1e11, "bfloat16": 4e11}
    efficiency, half = fit_products({"float32": seconds(0.8e11), "bfloat16": seconds(2e11)}, peaks)
    assert efficiency == pytest.approx({"float32": 0.8, "bfloat16": 0.5}, rel=0.02)
    assert half == pytest.approx(200, rel=0.02)


def test_products_are_measured_as_training_computes_them(monkeypatch):
    """Forward and backward of the function that layers call: on some CPUs, it is twice as fast as `F.linear`."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            time.sleep(3e-3)
            ctx.save_for_backward(x, weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx, grad):
            time.sleep(6e-3)
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.T @ x

    monkeypatch.setattr(measure, "linear", Slow.apply)
    monkeypatch.setattr(measure, "SIZES", (16, 32, 64))
    found = measure._products(torch.device("cpu"), "float32", 0.5)
    assert next(iter(found)) == 16
    assert all(3e-3 < seconds < 5e-3 for seconds in found.values())


def test_a_line_is_found_again_and_never_negative():
    latency, per_byte, error = fit_line({size: 1e-4 + size / 2e9 for size in (1024, 65536, 1 << 22)})
    assert (latency, per_byte, error) == pytest.approx((1e-4, 5e-10, 0), abs=1e-9)
    falling = fit_line({1024: 2e-4, 65536: 1e-4, 1 << 20: 1e-4})
    assert falling[1] == 0
    assert falling[0] > 0
    assert falling[2] > 0.2


def test_groups_are_those_of_meshes():
    sizes = group_sizes(8, 4)
    assert {(size.ranks, size.nodes) for size in sizes} == {(2, 1), (4, 1), (2, 2), (4, 2), (8, 2)}
    assert groups_of(GroupSize(4, 2), 8, 4) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    for size in sizes:
        assert sorted(rank for group in groups_of(size, 8, 4) for rank in group) == list(range(8))


@pytest.mark.parametrize("collective", [3e-3, 0.0], ids=["3 ms", "none: the difference may be negative"])
def test_the_time_of_computation_is_subtracted_from_that_of_a_collective(monkeypatch, collective):
    """Products take 8 ms, and a tenth of them a millisecond more. The other rank measures at most 1 ms."""
    clock, chooser = [0.0], random.Random(0)

    def wait(seconds):
        clock[0] += seconds

    monkeypatch.setattr(links.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(links.dist, "barrier", lambda: None)
    monkeypatch.setattr(links, "all_gather_object", lambda seconds: [seconds, min(seconds, 1e-3)])
    found = links._slowest(
        lambda: wait(collective),
        lambda: wait(8e-3 + 1e-3 * (chooser.random() < 0.1)),
        torch.device("cpu"),
        budget=5.0,
    )
    assert found >= links.LEAST_SECONDS
    assert found == pytest.approx(collective, abs=1e-4)


def test_levels_predict_the_rings_from_which_they_follow(tmp_path):
    """Two hosts of four ranks: 5 us and 10 GB/s within, 40 us and 1 GB/s between them."""
    within, across = (3 * 5e-6, 3 / 4 / 10e9), (6 * 5e-6 + 40e-6, 7 / 8 / (4 * 1e9))
    found = [
        LinkMeasurement(kind, size, {}, *line, 0.0)
        for kind in ("all_gather", "reduce_scatter")
        for size, line in ((GroupSize(4, 1), within), (GroupSize(8, 2), across))
    ]
    host, network = fitted_levels(found, 4)
    assert (host["devices"], host["latency_us"], host["bandwidth_gb_s"]) == pytest.approx((4, 5, 10))
    assert (network["latency_us"], network["bandwidth_gb_s"]) == pytest.approx((40, 1))
    path = tmp_path / "here.yaml"
    write_hardware(path, machine())
    add_links(path, [host, network], [], slowdown=None, source="a test")
    for ranks, (latency, per_byte) in ((4, within), (8, across)):
        seconds = Links(load_hardware(path)).seconds("all_gather", 1e8, Group(ranks))
        assert seconds == pytest.approx(latency + 1e8 * per_byte, rel=1e-3)


def test_links_are_added_to_a_file_and_its_other_lines_stay(tmp_path):
    path = tmp_path / "here.yaml"
    write_hardware(path, machine())
    assert guessed(load_hardware(path)) == ["device.power_w", "levels"]
    text = path.read_text().replace("\nhost:", "\n# seen\nhost:")
    path.write_text(text.replace("power_w: ", "power_w: 77  # by a meter, not ", 1))
    measured = [LinkMeasurement("all_reduce", GroupSize(2, 1), {}, latency, 1e-9, 0.0).row for latency in (3e-4, 1e-4)]
    for row in measured:
        add_links(path, [{"latency_us": 70.0}], [row], slowdown=0.5, source="here")
    text, hardware = path.read_text(), load_hardware(path)
    assert "power_w: 77  # by a meter" in text
    assert "# seen" in text
    assert [(one.kind, one.latency_us) for one in hardware.collectives] == [("all_reduce", 100.0)]
    assert (hardware.levels[0].latency_us, hardware.overlap.slowdown, hardware.device.power_w) == (70, 0.5, 77)
    assert "levels" not in guessed(hardware)


def test_the_operators_of_a_run_are_used_for_its_prediction(tmp_path):
    path, file = tmp_path / "run.yaml", tmp_path / "here.yaml"
    path.write_text(RUN)
    config = RunConfig.load(path, check_data=False)
    operators = run_operators(config, 1, "float32")
    assert ("matmul", (4 * 16, 32, 96), "float32") in operators
    assert ("attention", (4, 2, 2, 16, 16), "float32") in operators
    found = []
    for seconds in (0.0, 1e-4, 2e-4):
        file.unlink(missing_ok=True)
        write_hardware(file, machine(operators=dict.fromkeys(operators, seconds) if seconds else {}))
        found.append(predict(config, 1, load_hardware(file)).step_seconds)
    assert found[1] > 2 * found[0]  # tiny products take less than 100 us
    assert found[2] == pytest.approx(2 * found[1], rel=0.25)


def test_this_machine_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "device", "--seconds", "0.3", "--dtype", "float32", "--out", "here.yaml"]) == 0
    hardware = load_hardware("here.yaml")
    assert f"{torch.get_num_threads()} thread" in hardware.device.name
    assert 1e-4 < hardware.device.peak_tflops.given()["float32"] < 100
    assert 0.1 < hardware.device.memory_bandwidth_gb_s < 10_000
    (tmp_path / "run.yaml").write_text(RUN)
    assert predict(RunConfig.load("run.yaml", check_data=False), 1, hardware).step_seconds > 0
    assert main(["bench", "device", "--out", "here.yaml"]) == 2
    assert "here.yaml: already exists" in capsys.readouterr().err


PROGRAM = """
import sys
from weft.cli.main import main
from weft.planner import measure_host, measure_links

measure_host.CALLS, measure_links.CHUNKS = 2, 2  # rough numbers will do
measure_host.LAYERS, measure_host.TP_COLLECTIVES, measure_host.FSDP_COLLECTIVES = 1, 12, 8
words = ["bench", "comm", "--seconds", "0.1", "--into"]
assert main([*words, "other.yaml"]) == 2
assert main([*words, "here.yaml", "--plot", "links.svg"]) == 0
"""


def test_links_between_ranks_are_measured(tmp_path, ranks):
    from pool import run_program  # pyright: ignore[reportMissingImports]

    tree = machine()
    tree["device"]["name"] = re.sub(r"\d+ threads?$", "1 thread", tree["device"]["name"])
    write_hardware(tmp_path / "here.yaml", tree)
    tree["device"]["name"] = "NVIDIA H100"
    write_hardware(tmp_path / "other.yaml", tree)
    (tmp_path / "program.py").write_text(PROGRAM)
    said, _ = ranks.call(run_program, 2, tmp_path, "program.py")
    assert "other.yaml: the file is of NVIDIA H100, but this machine has " in said
    assert load_hardware(tmp_path / "other.yaml").collectives == []
    hardware = load_hardware(tmp_path / "here.yaml")
    assert {(one.kind, one.ranks, one.nodes) for one in hardware.collectives} == {
        (kind, 2, 1) for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
    }
    assert all(one.latency_us < 1e6 and math.isfinite(one.bandwidth_gb_s) for one in hardware.collectives)
    assert all(10 < value < 1e5 for value in (hardware.host.tp_us, hardware.host.fsdp_us))  # Python, not launches
    assert 0.01 < (hardware.host.fsdp_gb_s or 0) <= links.FASTEST
    assert 0 <= hardware.overlap.slowdown <= links.MOST_SLOWDOWN
    assert (tmp_path / "links.svg").read_text().count("<circle") >= 5 * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("device", "--out", "."), ".: a directory, not a file; choose another name for --out"),
        (("device", "--out", "no/here.yaml"), "no does not exist; create it, or choose another name for --out"),
        (("comm", "--into", "."), ".: a directory, not a file; choose another name for --into"),
        (("comm", "--into", "here.yaml"), "no such file; write one first: weft bench device --out FILE"),
        (("comm", "--plot", "no/links.svg"), "no does not exist; create it, or choose another name for --plot"),
    ],
)
def test_files_that_cannot_be_written_are_reported_before_measuring(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "measuring" not in err
    assert list(tmp_path.iterdir()) == []


def test_one_process_has_no_links(capsys):
    assert main(["bench", "comm"]) == 2
    assert "use --nproc 2 or more" in capsys.readouterr().err
