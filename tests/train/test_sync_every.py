"""`training.sync_every`: the host reads the numbers of several steps at once, and nothing else changes."""

import json

import pytest
from running import assert_same_weights, losses, train
from test_watch import PARTS

from weft.checkpoint.load import checkpoints
from weft.cli.main import main
from weft.observe.events import read_events

STEPS = 12


@pytest.fixture
def write(run_yaml, tmp_path, monkeypatch):
    """Writes a run of 12 steps of 4 rows; `bad` is the row that breaks the loss."""
    (tmp_path / "watch_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)

    def make(name, *, bad=-1, factor=0.0, watch=None, **training):
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            data={
                "train": {"type": "watch_parts:Rows", "bad": bad},
                "validation": None,
                "sequence_length": 32,
                "shuffle": False,
            },
            objective={"type": "watch_parts:Broken", "factor": factor},
            model={"num_hidden_layers": 1},
            training={
                "steps": STEPS,
                "dtype": "float32",
                "batch_tokens": 128,
                "threads": 1,
                "grad_clip": 0.5,
                **training,
            },
            schedule={"type": "constant", "warmup_steps": 2},
            checkpoint={"every": 4},
            log={"trackers": [], "every": 4},
        )
        with file.open("a") as out:
            out.write(f"watch: {json.dumps(watch or {})}\n")
        return file, tmp_path / "runs" / name

    return make


def test_reading_later_changes_no_number(write):
    runs = []
    for name, every in (("each", 1), ("later", 3)):
        file, run = write(name, sync_every=every)
        assert train(file) == 0
        runs.append(run)
    assert losses(runs[0]) == losses(runs[1])
    assert [step for step, *_ in losses(runs[1])] == [4, 8, 12]
    assert_same_weights(*(checkpoints(run)[-1] for run in runs))


def test_a_loss_that_nobody_has_read_is_not_shown(write, capfd):
    file, _ = write("unread", sync_every=50)
    assert main(["train", str(file), "log.every=12", "checkpoint.every=12"]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step ")]
    assert "nan" not in "".join(lines)
    assert "loss" in lines[-1]


def test_a_rollback_skips_the_data_of_a_bad_step_that_is_found_later(write):
    """Step 6 (rows 20 to 23) is found with step 8, and skipped as if it had been found at once."""
    watch = {"spike": {"window": 8, "factor": 20.0, "action": "rollback"}}
    runs = []
    for name, every in (("each", 1), ("later", 4)):
        file, run = write(name, bad=22, factor=500.0, sync_every=every, watch=watch)
        assert train(file) == 0
        assert [(one["step"], one["action"]) for one in read_events(run)] == [(6, "rollback")]
        runs.append(run)
    assert losses(runs[0]) == losses(runs[1])
    assert_same_weights(*(checkpoints(run)[-1] for run in runs))


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(write, capsys):
    file, run = write("nan", bad=22, sync_every=4)
    assert train(file) != 0
    assert [(one["step"], one["event"]) for one in read_events(run)][:1] == [(6, "non-finite")]
    assert checkpoints(run)[-1].name == "step-00000004"  # from before it
    assert "training.sync_every" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("training", "watch", "key"),
    [
        ({}, {"non_finite": "skip"}, "watch.non_finite"),
        ({}, {"spike": {"action": "skip"}}, "watch.spike.action"),
        ({"dtype": "float16"}, {}, "training.dtype"),
    ],
)
def test_what_must_decide_before_the_update_is_refused(write, capsys, training, watch, key):
    file, _ = write("refused", sync_every=2, watch=watch, **training)
    assert main(["config", "check", str(file)]) == 2
    assert f"{key}:" in capsys.readouterr().err
