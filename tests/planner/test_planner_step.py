"""The predicted time of a step, beside closed forms."""

import subprocess
import sys
from pathlib import Path

import pytest
from planner_hardware import ideal

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.kernels import blocked_attention
from weft.kernels.cross_entropy import KEPT_ELEMENTS
from weft.planner import tensors
from weft.planner.communication import Group, Links, mesh_groups
from weft.planner.compute import Costs
from weft.planner.hardware import load_hardware
from weft.planner.reduction import with_reduction
from weft.planner.step import predict
from weft.planner.units import Job
from weft.planner.work import KEPT_LOGITS, Matmul, Stack, Work

RUN = """
model: {vocab_size: 64, hidden_size: 1024, num_hidden_layers: 8, num_attention_heads: 8, intermediate_size: 4096,
        mlp: plain, hidden_act: gelu}
data: {sequence_length: 512}
training: {steps: 10, batch_tokens: 32768, micro_batch_size: 1, dtype: float32, grad_clip: null}
"""


@pytest.fixture
def run(tmp_path):
    """Returns a function from overrides and a number of ranks to a checked config."""
    path = tmp_path / "run.yaml"
    path.write_text(RUN)

    def load(ranks: int = 1, *overrides: str) -> RunConfig:
        return RunConfig.load(path, overrides, check_data=False, ranks=ranks)

    return load


def test_one_device_takes_its_flops_over_its_rate(run):
    predicted = predict(run(), 1, ideal(tflops=0.1))
    layer = 4 * 1024**2 + 2 * 1024 * 4096
    products = 6 * (8 * layer + 64 * 1024) * 32768
    # Attention sees half of all pairs; backward has 5 products for 2 of forward, at 0.8 of the rate.
    attention = 8 * 64 * 4 * 512**2 / 2 * 1024 * (1 + 2.5 / 0.8)
    assert predicted.step_seconds == pytest.approx((products + attention) / 1e11, rel=2e-3)
    assert predicted.tokens_per_second == pytest.approx(32768 / predicted.step_seconds)
    flops = 6 * (8 * layer + 64 * 1024) + 12 * 8 * 1024 * 512  # the definition of MFU does not halve attention
    assert predicted.mfu == pytest.approx(predicted.tokens_per_second * flops / 1e11)


def test_attention_that_is_not_fused_computes_all_pairs(run):
    predicted = predict(run(), 1, ideal(tflops=0.1), stack=Stack(fused_attention=False))
    layer = 4 * 1024**2 + 2 * 1024 * 4096
    products = 6 * (8 * layer + 64 * 1024) * 32768
    attention = 8 * 64 * 4 * 512**2 * 1024 * 3  # two products in forward and four in backward, also of hidden pairs
    # In forward, scores are written, read and written by softmax and dropout, and read; dropout's mask has a byte.
    moved = 3 * 8 * 64 * 8 * 512**2 * (6 * 4 + 1)
    fused = predict(run(), 1, ideal(tflops=0.1), stack=Stack()).step_seconds
    attention_fused = 8 * 64 * 4 * 512**2 / 2 * 1024 * (1 + 2.5 / 0.8)
    more = (attention - attention_fused) / 1e11 + moved / 1e15
    assert predicted.step_seconds - fused == pytest.approx(more, rel=1e-3)
    assert predicted.step_seconds == pytest.approx((products + attention) / 1e11, rel=2e-3)


def test_limits_are_those_of_the_kernels():
    assert (KEPT_LOGITS, tensors.LONG) == (KEPT_ELEMENTS, blocked_attention.LONG)  # copies: the kernels need torch


def test_recomputation_repeats_the_forward_pass(run):
    plain, full, half = (
        predict(run(1, f"training.activation_checkpointing={how}"), 1, ideal(tflops=0.1)).parts
        for how in ("none", "full", "every-2")
    )
    assert full["compute"] == pytest.approx(plain["compute"])
    assert "recompute" not in plain
    forward = 2 * 8 * (4 * 1024**2 + 2 * 1024 * 4096) * 32768 + 8 * 64 * 4 * 512**2 / 2 * 1024
    assert full["recompute"] == pytest.approx(forward / 1e11, rel=2e-3)
    assert half["recompute"] == pytest.approx(full["recompute"] / 2)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_ring_takes_its_steps_and_its_bytes(kind):
    links = Links(ideal([{"name": "link", "latency_us": 10.0, "bandwidth_gb_s": 5.0}]))
    assert links.seconds(kind, 1e9, Group(8)) == pytest.approx(7 * 10e-6 + 7 / 8 * 1e9 / 5e9)
    assert links.seconds("all_reduce", 1e9, Group(8)) <= 2 * links.seconds(kind, 1e9, Group(8))
    assert links.seconds(kind, 1e9, Group(1)) == 0


def test_a_ring_over_nodes_uses_the_adapters_of_all_its_devices():
    levels = [
        {"name": "nvlink", "devices": 4, "latency_us": 2.0, "bandwidth_gb_s": 100.0},
        {"name": "network", "latency_us": 20.0, "bandwidth_gb_s": 10.0},
    ]
    links = Links(ideal(levels))
    # 16 ranks on 4 nodes: 3 steps between nodes, 12 within; 4 adapters of 10 GB/s.
    assert links.seconds("all_gather", 1e9, Group(16)) == pytest.approx(3 * 20e-6 + 12 * 2e-6 + 15 / 16 / 40)
    # One rank on each of 4 nodes: one adapter.
    assert links.seconds("all_gather", 1e9, Group(4, 4)) == pytest.approx(3 * 20e-6 + 3 / 4 / 10)
    # Within a node.
    assert links.seconds("all_gather", 1e9, Group(4)) == pytest.approx(3 * 2e-6 + 3 / 4 / 100)
    assert links.seconds("send", 1e9, Group(2, 4)) == pytest.approx(20e-6 + 1 / 10)
    # A small all-reduce is faster by a tree than by a ring.
    assert links.seconds("all_reduce", 8, Group(64, 4)) == pytest.approx(2 * 6 * 20e-6, rel=1e-3)


def test_a_measured_collective_replaces_the_estimate():
    measured = {"kind": "all_gather", "ranks": 8, "latency_us": 100.0, "bandwidth_gb_s": 2.0}
    links = Links(ideal(collectives=[measured]))
    assert links.seconds("all_gather", 1e9, Group(8)) == pytest.approx(100e-6 + 0.5)
    assert links.seconds("all_gather", 1e9, Group(4)) < 0.1


@pytest.mark.parametrize(
    ("axis", "collectives", "us"),
    [("tp", 64 * 2 * (8 * 4 + 2), "tp_us"), ("dp_shard", 32 * (8 + 7 + 3) + 8 + 3, "fsdp_us")],
    ids=[
        "tp: 4 of a block, 1 of embedding and head",
        "fsdp: of 8 blocks, embedding, head and norm, gathers of each micro-batch and one reduction",
    ],
)
def test_a_cpu_waits_for_what_the_host_does_for_each_collective(run, axis, collectives, us):
    config = run(2, "parallel.dp_shard=1", f"parallel.{axis}=2")

    def seconds(kind: str, value: float) -> float:
        machine = ideal()
        device = machine.device.model_copy(update={"kind": kind})
        host = machine.host.model_copy(update={us: value})
        return predict(config, 2, machine.model_copy(update={"device": device, "host": host})).step_seconds

    assert seconds("cpu", 100.0) - seconds("cpu", 0.0) == pytest.approx(collectives * 1e-4, rel=1e-4)
    assert seconds("gpu", 100.0) == seconds("gpu", 0.0)


def test_without_overlap_a_step_is_computation_and_all_collectives(run):
    links = [{"name": "link", "latency_us": 100.0, "bandwidth_gb_s": 1e5}]
    config, alone = run(2, "parallel.dp_shard=2"), ideal(tflops=0.1)
    computed = predict(config, 2, alone).step_seconds
    beside = predict(config, 2, ideal(links, tflops=0.1)).parts["dp_shard"]
    assert beside < 0.01  # of the first gather of each micro-batch, and the last reduction
    waited = predict(config, 2, ideal(links, tflops=0.1, slowdown=1000.0)).step_seconds - computed
    assert waited == pytest.approx((32 * (8 + 7 + 3) + 8 + 3) * 1e-4, rel=0.01)


def on_cpu(machine, **host):
    """Returns a machine whose devices are CPUs."""
    device = machine.device.model_copy(update={"kind": "cpu"})
    return machine.model_copy(update={"device": device, "host": machine.host.model_copy(update=host)})


def test_fsdp_waits_for_each_collective_on_a_cpu(run):
    """FSDP2 overlaps by streams, which CPUs lack. Plain replicas start their all-reduces beside backward."""
    links = [{"name": "link", "latency_us": 100.0, "bandwidth_gb_s": 1e5}]
    machine = on_cpu(ideal(links, tflops=0.1))
    fsdp = predict(run(2, "parallel.dp_shard=2"), 2, machine).parts
    assert fsdp["dp_shard"] == pytest.approx((32 * (8 + 7 + 3) + 8 + 3) * 1e-4, rel=0.01)
    tied = predict(run(2, "parallel.dp_shard=2", "model.tie_word_embeddings=true"), 2, machine).parts
    assert tied["dp_shard"] == pytest.approx((32 * (8 + 7 + 1) + 8 + 1) * 1e-4, rel=0.01)  # one unit beside the blocks
    replicas = predict(run(2, "parallel={dp_replicate: 2, dp_shard: 1}"), 2, machine).parts
    assert replicas["dp_replicate"] < 1e-3  # what follows backward
    hybrid = predict(run(4, "parallel={dp_replicate: 2, dp_shard: 2}"), 4, machine).parts
    assert hybrid["dp_replicate"] == pytest.approx((8 + 3) * 2 * 1e-4, rel=0.01)  # blocks, embedding, head and norm


def test_copies_of_fsdp_take_the_measured_rate_of_a_cpu(run):
    config, machine = run(2, "parallel.dp_shard=2"), ideal(tflops=0.1)
    block, root = 4 * (4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024), 4 * (2 * 64 + 1) * 1024  # bytes
    copied = block * (32 * (8 + 7) + 8) + root * 2
    without, measured = (predict(config, 2, on_cpu(machine, fsdp_gb_s=rate)).parts for rate in (None, 2.0))
    assert measured["dp_shard"] - without["dp_shard"] == pytest.approx(copied / 2e9, rel=1e-3)
    assert predict(config, 2, machine).parts["dp_shard"] < 0.01  # a GPU's copies take its memory's bandwidth


@pytest.mark.parametrize("zero", [3, 1])
def test_gradients_of_further_micro_batches_are_added(run, zero):
    """An addition reads two numbers and writes one; those of shards if each micro-batch is reduced."""
    machine = ideal(tflops=1000.0)
    device = machine.device.model_copy(update={"memory_bandwidth_gb_s": 100.0})
    machine = machine.model_copy(update={"device": device})
    ends = ["parallel={dp_shard: 2, zero_stage: %d}" % zero, "training.grad_clip=null"]  # noqa: UP031

    def seconds(micro_batches: int) -> float:
        words = [*ends, f"training.batch_tokens={2 * 512 * micro_batches}"]
        return predict(run(2, *words), 2, machine).parts["compute"]

    block = 4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024
    parameters = (8 * block + (2 * 64 + 1) * 1024) / (2 if zero == 3 else 1)
    more = seconds(2) - seconds(1) - (seconds(1) - 0)
    assert more == pytest.approx(3 * 4 * parameters / 1e11, rel=1e-3)


def test_ulysses_sends_queries_keys_values_and_outputs(run):
    links = [{"name": "link", "latency_us": 100.0, "bandwidth_gb_s": 1e5}]
    words = ["parallel={cp: 2, dp_shard: 1, cp_method: all_to_all}"]
    calls = 64 * 8 * 2 * 4  # micro-batches, layers, forward and backward, tensors
    assert predict(run(2, *words), 2, ideal(links)).parts["cp"] == pytest.approx(calls * 1e-4, rel=0.01)


def test_groups_have_the_strides_of_the_mesh(run):
    from weft.config.mesh import MeshShape

    groups = mesh_groups(MeshShape(pp=2, dp_replicate=3, dp_shard=4, cp=2, tp=2, ep=4))
    assert groups["tp"] == Group(2, 1)
    assert groups["cp"] == Group(2, 2)
    assert groups["fsdp"] == Group(8, 2)
    assert groups["ep"] == Group(4, 2)
    assert groups["efsdp"] == Group(2, 8)
    assert groups["dp_replicate"] == Group(3, 16)
    assert groups["pp"] == Group(2, 48)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (8, 64), (2, 32)])
def test_bubble_of_equal_stages(run, schedule, ranks, micro_batches):
    layers = ",".join([str(8 // ranks)] * ranks)
    config = run(
        ranks,
        f"parallel.pp={ranks}",
        f"parallel.pp_schedule={schedule}",
        f"parallel.stage_layers=[{layers}]",
        f"training.batch_tokens={512 * micro_batches}",
    )
    predicted = predict(config, ranks, ideal(tflops=0.1))
    expected = (ranks - 1) / (micro_batches + ranks - 1)
    assert predicted.parts["bubble"] / predicted.step_seconds == pytest.approx(
        expected, rel=6e-3
    )  # the last stage has a small head


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(run):
    def bubble(schedule, stages):
        layers = [8 // (4 * stages)] * 4 * stages
        more = [f"parallel.pp_schedule={schedule}", f"parallel.stage_layers={layers}"]
        config = run(4, "parallel.pp=4", "training.batch_tokens=16384", *more)
        return predict(config, 4, ideal(tflops=0.1)).parts["bubble"]

    assert bubble("interleaved_1f1b", 2) == pytest.approx(bubble("1f1b", 1) / 2, rel=5e-3)
    assert bubble("zbv_zero_bubble", 2) < 0.5 * bubble("interleaved_1f1b", 2)


def test_many_micro_batches_continue_few(run, monkeypatch):
    """Not all micro-batches are simulated, and the result is as if they were."""
    from weft.planner import pipeline, step

    machine = load_hardware("a100-leonardo")
    cases = [(4, ["parallel.dp_shard=4"]), (4, ["parallel.pp=4"])]
    cases += [(2, ["parallel.pp=2", "parallel.pp_schedule=interleaved_zero_bubble"])]
    for ranks, overrides in cases:
        config = run(ranks, *overrides, f"training.batch_tokens={512 * 96}")
        extrapolated = predict(config, ranks, machine)
        with monkeypatch.context() as patch:
            patch.setattr(step, "FEW", 10**6)
            patch.setattr(pipeline, "ROUNDS", 10**6)
            full = predict(config, ranks, machine)
        assert extrapolated.step_seconds == pytest.approx(full.step_seconds, rel=1e-3)
        for name, seconds in full.parts.items():
            assert extrapolated.parts[name] == pytest.approx(seconds, rel=1e-2, abs=1e-4)


def test_communication_is_hidden_or_exposed(run):
    """The all-gathers of FSDP2 run beside computation; what remains is the first, and the last reduction."""
    fast = [{"name": "link", "latency_us": 1.0, "bandwidth_gb_s": 1000.0}]
    slow = [{"name": "link", "latency_us": 1.0, "bandwidth_gb_s": 0.05}]
    overrides = ["parallel.dp_shard=8", "training.batch_tokens=4096"]
    hidden, exposed = (predict(run(8, *overrides), 8, ideal(levels, tflops=0.1)).parts for levels in (fast, slow))
    assert hidden["dp_shard"] < 0.01 * hidden["compute"]
    # The slow link is never free: two all-gathers and one reduce-scatter of all layers, but for the last layer's, which
    # is not gathered twice.
    layer, links = 4 * 1024**2 + 2 * 1024 * 4096, 7 / 8 / 0.05e9
    transfers = (3 * 8 - 1) * layer * 4 * links
    assert exposed["dp_shard"] + exposed["compute"] == pytest.approx(transfers, rel=0.06)


def test_parts_sum_to_the_step(run):
    machine = load_hardware("h100-mn5")
    for ranks, overrides in [
        (1, []),
        (8, ["parallel.dp_shard=2", "parallel.tp=2", "parallel.cp=2"]),
        (8, ["parallel.dp_replicate=2", "parallel.cp=2", "parallel.cp_method=ring", "parallel.zero_stage=1"]),
        (8, ["parallel.pp=2", "parallel.tp=2", "training.activation_checkpointing=full"]),
        (8, ["parallel.pp=4", "parallel.pp_schedule=dualpipev", "parallel.stages_per_rank=2"]),
        (8, ["parallel.offload=parameters", "training.dtype=bfloat16"]),
    ]:
        predicted = predict(run(ranks, *overrides), ranks, machine)
        assert sum(predicted.parts.values()) == pytest.approx(predicted.step_seconds)
        assert all(seconds > 0 for seconds in predicted.parts.values())
        axes = {one.split("=")[0].partition(".")[2] for one in overrides if one.endswith("=2")}
        assert axes & {"tp", "cp", "pp"} <= set(predicted.parts)


def test_ring_attention_that_gathers_keys_takes_the_time_of_it(run):
    machine, cp = load_hardware("h100-mn5"), ("parallel.dp_replicate=2", "parallel.cp=2")
    for option in ("model.attention_sinks=true", "model.attn_logit_softcapping=30", "model.attention_dropout=0.1"):
        ring, gathers, plain = (
            predict(run(8, *cp, *more), 8, machine).parts["cp"]
            for more in (
                ("parallel.cp_method=ring", option),
                ("parallel.cp_method=all_gather", option),
                ("parallel.cp_method=ring",),
            )
        )
        assert ring == gathers != plain


def test_a_prediction_needs_no_torch():
    code = "import sys, weft.planner.step as step; print('torch' in sys.modules, step.predict.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "predict"]


def test_the_example_of_the_manual_runs(run, tmp_path, monkeypatch, capsys):
    run()
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text("utf-8")
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    seconds, mfu, _ = capsys.readouterr().out.split(" ", 2)
    assert float(seconds) > 0 < float(mfu) < 1


def test_weights_of_products_by_rows_are_gathered_in_half_of_the_time(run):
    overrides = "training.dtype=bfloat16", "parallel.dp_shard=8"
    found = {}
    for fp8 in ("true", "rowwise"):
        hardware = load_hardware("h100-sxm")
        [stage] = Job(run(8, *overrides, f"training.fp8={fp8}"), 8, hardware).stages()
        found[fp8] = stage.units[0].gather, stage.root.gather
    assert 0.4 < found["rowwise"][0] / found["true"][0] < 0.9
    assert found["rowwise"][1] == found["true"][1]


def test_what_has_no_prediction_is_refused(run):
    with pytest.raises(UserError, match="no peak in float8"):
        predict(run(1, "training.fp8=true", "training.dtype=bfloat16"), 1, load_hardware("a100-sxm"))
    with pytest.raises(UserError, match=r"model.vocab_size: not known"):
        predict(run().model_copy(update={"model": run().model.model_copy(update={"vocab_size": None})}), 1, ideal())


def test_a_cpu_adds_the_time_to_start_operations():
    work = Work(matmuls=(Matmul(1000, 1000, 1000),), operations=10)

    def passes(kind, launch):
        machine = ideal()
        return Costs(
            machine.model_copy(
                update={"device": machine.device.model_copy(update={"kind": kind, "launch_us": launch})}
            ),
            "float32",
        ).passes(work)

    gpu, slow_gpu, cpu = passes("gpu", 10.0), passes("gpu", 1000.0), passes("cpu", 10.0)
    assert gpu.forward == pytest.approx(2e-3, rel=1e-2)  # 2 GFLOP at 1 TFLOP/s, beside which 100 us are hidden
    assert slow_gpu.forward == pytest.approx(10e-3)
    assert cpu.forward == pytest.approx(gpu.forward + 100e-6)
    assert cpu.backward == pytest.approx(gpu.backward + 200e-6)


def test_gradients_stay_unsharded_where_they_need_little_memory(run):
    """As a run decides if neither `reduce_gradients` nor `zero_stage` is set."""
    parameters = 8 * (4 * 1024**2 + 2 * 1024 * 4096 + 2 * 1024) + (2 * 64 + 1) * 1024
    config = run(2, "parallel.dp_shard=2")
    for memory_gb, how in ((parameters * 16.1e-9, "last"), (parameters * 15.9e-9, "every")):
        machine = ideal([{"name": "link", "latency_us": 1.0, "bandwidth_gb_s": 1.0}])
        machine = machine.model_copy(update={"device": machine.device.model_copy(update={"memory_gb": memory_gb})})
        assert with_reduction(config, 2, machine).parallel.reduce_gradients == how
        chosen = run(2, "parallel.dp_shard=2", f"parallel.reduce_gradients={how}")
        other = run(2, "parallel.dp_shard=2", f"parallel.reduce_gradients={'last' if how == 'every' else 'every'}")
        seconds = [predict(one, 2, machine).step_seconds for one in (config, chosen, other)]
        assert seconds[0] == seconds[1] != seconds[2]
    for words in (["parallel.pp=2"], ["parallel={dp_replicate: 2, dp_shard: 1}"], ["parallel.zero_stage=2"]):
        assert with_reduction(run(2, *words), 2, machine).parallel.reduce_gradients is None
