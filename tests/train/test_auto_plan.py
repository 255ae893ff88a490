"""`parallel: auto`: the planner chooses the mesh of a run, and the losses are those of one process."""

import json
from pathlib import Path

import pytest

import weft
from weft.cli.main import main
from weft.config.dump import read_saved
from weft.errors import UserError

SHORT = {
    "training": {"steps": 2, "micro_batch_size": None},
    "data": {"validation": None},
    "schedule": {"type": "constant", "warmup_steps": 0},
}


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.xdist_group("ranks")
def test_two_ranks_train_by_a_plan_as_one_process_does(run_yaml, tmp_path, ranks):
    one = run_yaml(**SHORT, run={"name": "one"})
    assert main(["train", str(one)]) == 0
    ranks.run(run_yaml(**SHORT, run={"name": "two"}, parallel="auto"), 2)
    run = tmp_path / "runs" / "two"
    assert losses(run) == pytest.approx(losses(tmp_path / "runs" / "one"), abs=1e-4)
    saved = read_saved(run / "config.yaml")["parallel"]
    sizes = [saved[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    product = 1
    for size in sizes:
        product *= size
    assert (saved["auto"], product) == (True, 2)


def test_a_resumed_run_keeps_its_plan(run_yaml, tmp_path, capsys):
    path = run_yaml(**SHORT, parallel="auto")
    assert main(["train", str(path)]) == 0
    first = read_saved(tmp_path / "runs" / "demo" / "config.yaml")
    assert isinstance(first["training"]["micro_batch_size"], int)
    capsys.readouterr()
    assert main(["train", str(path), "training.steps=3", "parallel={auto: true, hardware: nosuch}"]) == 0
    assert "as in the last session" in capsys.readouterr().err
    assert read_saved(tmp_path / "runs" / "demo" / "config.yaml")["training"] == first["training"] | {"steps": 3}
    assert len(losses(tmp_path / "runs" / "demo")) == 3


def test_short_and_long_form_are_the_same(run_yaml):
    short = weft.RunConfig.load(run_yaml("a.yaml", **SHORT, parallel="auto"))
    long = weft.RunConfig.load(run_yaml("b.yaml", **SHORT, parallel={"auto": True}))
    assert short == long
    assert short.parallel.auto


def test_a_plan_that_cannot_be_made_is_one_line(run_yaml, capsys):
    assert main(["train", str(run_yaml(**SHORT, parallel={"auto": True, "hardware": "h100-sxmm"}))]) == 2
    message = capsys.readouterr().err
    assert "h100-sxm" in message
    with pytest.raises(UserError, match=r"parallel\.auto: true"):
        weft.RunConfig.load(run_yaml(**SHORT, parallel={"hardware": "h100-sxm"}))
    with pytest.raises(UserError, match="parallel"):
        weft.RunConfig.load(run_yaml(**SHORT, parallel="automatic"))
