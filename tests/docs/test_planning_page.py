"""docs/planning.md: its commands run, on a small model and for a short time, and its keys are accepted."""

import contextlib
import csv
import io
import json
import shlex

import pytest
from tutorial import DOCS, FENCE

from weft.cli.main import main
from weft.config.run import RunConfig
from weft.planner.hardware import load_hardware

PAGE = (DOCS / "planning.md").read_text(encoding="utf-8")
RUN = """
model: {preset: llama-tiny, vocab_size: 256}
data: {train: no-such-store, sequence_length: 128}
training: {tokens: 1e6, batch_tokens: 16384}
"""


def blocks(kind: str) -> list[str]:
    return [body for info, body in FENCE.findall(PAGE) if info == kind]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    law = [(n, d, 1.8 + 480 / n**0.35 + 2000 / d**0.37) for n in (1e7, 4e7, 2e8, 1e9) for d in (1e9, 1e10, 1e11)]
    with (tmp_path / "losses.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("parameters", "tokens", "loss"), *law])
    return tmp_path


def run(command: str, *more: str) -> str:
    """Runs a command of the page with `more` options, and returns its stdout; `> FILE` is done as a shell does it."""
    words, _, target = command.partition(" > ")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*shlex.split(words)[1:], *more]) == 0, command
    if target:
        with open(target.strip(), "w") as file:
            file.write(out.getvalue())
    return out.getvalue()


def test_the_commands_run_in_the_pages_order(here):
    pytest.importorskip("scipy")
    ran = [line for body in blocks("") for line in body.splitlines()]
    plan, device, links, runs, losses = ran
    run(plan)
    config = RunConfig.load("plan.yaml", check_data=False, ranks=64)
    assert config.training.batch_tokens == 16384
    run(device.replace("--nproc 2 ", ""), "--seconds", "0.2", "--dtype", "float32")  # 2 ranks: test_planner_measure.py
    assert load_hardware("here.yaml").device.kind == "cpu"
    assert links == "weft bench comm --nproc 2 --into here.yaml --plot links.svg"
    assert runs == "weft scaling fit runs/ladder-*"
    run(losses, "--resamples", "2")
    assert json.loads((here / "fit.json").read_text())["parametric"]["alpha"]["value"] > 0
    assert "own" in run("weft plan --budget 1e22 --scaling fit.json")
    options = ("--keep-mesh", "--largest micro_batch", "--json")
    assert all(f"`{option}`" in PAGE for option in options)
    found = json.loads(run(f"weft plan run.yaml --devices 8 --hardware h100-sxm {' '.join(options)}"))
    assert found["plans"]
    assert found["largest_micro_batch"] >= 1


def test_the_code_and_the_keys_of_the_page(here):
    (code,) = blocks("python")
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    assert names["predicted"].step_seconds == pytest.approx(sum(names["predicted"].parts.values()))
    (keys,) = blocks("yaml")
    (here / "auto.yaml").write_text(f"extends: run.yaml\n{keys}")
    config = RunConfig.load("auto.yaml", ["parallel={auto: true, hardware: here.yaml}"], check_data=False)
    assert "parallel: {auto: true, hardware: here.yaml}" in PAGE
    assert (config.parallel.auto, config.training.micro_batch_size) == (True, "auto")
