"""A resumed run whose config or data changed: what alters the training needs `--accept-changes`, and is recorded."""

import json
import shutil

import pytest
from running import QUIET, losses, train

from weft.cli.main import main

SHORT = {
    "training": {"steps": 6, "batch_tokens": 256, "threads": 1},
    "schedule": {"warmup_steps": 1},
    "checkpoint": {"every": 2},
    "data": {"validation": None},
}
# A callback that ends the run in the middle, as a kill would.
HALF = """
class Half:
    def __init__(self, at: int = 4):
        self.at = at

    def step(self, state):
        if state.step == self.at:
            state.request_stop("half")
"""


@pytest.fixture
def halted(run_yaml, tmp_path, monkeypatch):
    """A run of 6 steps that stopped after step 4; the file that resumes it."""
    (tmp_path / "half_for_changes.py").write_text(HALF)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    file = run_yaml(**SHORT, log=QUIET, callbacks=["half_for_changes:Half"])
    assert train(file) == 0
    assert len(losses(tmp_path / "runs" / "demo")) == 4
    return file


def sessions(tmp_path) -> list[dict]:
    return json.loads((tmp_path / "runs" / "demo" / "manifest.json").read_text())["sessions"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("optimizer.lr=1e-3", "optimizer.lr: 0.003 -> 0.001"),
        ("training.steps=8", "training.steps: 6 -> 8"),  # the cosine schedule depends on the length
        ("training.grad_clip=null", "training.grad_clip: 1.0 -> None"),
        ("data.shuffle=false", "data.shuffle: True -> False"),
        ("objective.z_loss=1e-4", "objective.z_loss: "),
        ("schedule.warmup_steps=2", "schedule.warmup_steps: 1 -> 2"),
    ],
)
def test_changes_that_alter_the_training_are_refused_with_the_old_and_the_new_value(
    halted, tmp_path, capsys, change, line
):
    before = {path.name: path.read_bytes() for path in (tmp_path / "runs" / "demo").iterdir() if path.is_file()}
    assert train(halted, change) == 2
    said = capsys.readouterr().err
    assert f"changed since the run last trained: {line}" in said
    assert "1 change of config or data since step 4 would alter the training" in said
    assert "--accept-changes" in said
    assert "Traceback" not in said
    assert {p.name: p.read_bytes() for p in (tmp_path / "runs" / "demo").iterdir() if p.is_file()} == before


def test_an_accepted_change_is_recorded_and_stops_a_repetition_before_it(halted, tmp_path, capsys):
    assert train(halted, "optimizer.lr=1e-3", "callbacks=[]", "--accept-changes") == 0
    assert "changed since the run last trained: optimizer.lr: 0.003 -> 0.001" in capsys.readouterr().err
    first, second = sessions(tmp_path)
    assert "changes" not in first
    assert second["changes"]["optimizer.lr"] == [0.003, 0.001]
    assert len(losses(tmp_path / "runs" / "demo")) == 6
    # The new value is that of the run from now on: nothing has changed, so nothing is to be accepted.
    assert train(halted, "optimizer.lr=1e-3", "callbacks=[]", "training.steps=7") == 0
    assert "optimizer.lr" not in capsys.readouterr().err

    assert main(["reproduce", "runs/demo"]) == 2
    assert "the config of this run changed after step 4" in capsys.readouterr().err
    assert main(["reproduce", "runs/demo", "--from", "6"]) == 0


def test_what_alters_nothing_needs_no_acceptance(halted, tmp_path, tiny_store, capsys):
    moved = shutil.copytree(tiny_store, tmp_path / "moved")
    same = ("log.every=2", "checkpoint.every=3", "training.micro_batch_size=2", f"data.train={moved}")
    assert train(halted, *same) == 0
    said = capsys.readouterr().err
    assert "changed since the run last trained: training.micro_batch_size: 4 -> 2" in said
    assert "data.train" not in said  # the same content in another place


def test_data_with_another_content_in_the_same_place_are_a_change(run_yaml, tmp_path, tiny_store, tiny_heldout, capsys):
    place = shutil.copytree(tiny_store, tmp_path / "place")
    file = run_yaml(**{**SHORT, "data": {"validation": None, "train": str(place)}}, log=QUIET)
    assert train(file) == 0
    shutil.rmtree(place)
    shutil.copytree(tiny_heldout, place)
    assert train(file, "training.steps=8") == 2  # a finished run may become longer
    assert "data.train (content): " in capsys.readouterr().err
    assert train(file, "training.steps=8", "--accept-changes") == 0
    assert [*sessions(tmp_path)[-1]["changes"]] == ["training.steps", "data.train (content)"]
