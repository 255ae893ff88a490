"""The watch on a run: steps with bad data are skipped or undone, and leave no trace in what follows."""

import json

import pytest
from running import QUIET, assert_same_weights, losses, train

from weft.checkpoint.load import checkpoints
from weft.cli.main import main
from weft.observe.events import read_events

# Data whose row `bad` begins with a token that no other row has, and an objective that this token breaks.
PARTS = '''
import numpy as np


class Rows:
    def __init__(self, *, bad: int = -1, without: list[int] = []):
        rows = np.random.default_rng(3).integers(0, 511, (96, 32))
        if bad >= 0:
            rows[bad, 0] = 511
        self.rows = rows if not without else np.delete(rows, slice(*without), axis=0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i]}


class Broken:
    """Next-token prediction; the bad token multiplies the loss by `factor`, of which 0 stands for NaN."""

    def __init__(self, *, factor: float = 0.0):
        self.factor = factor or float("nan")

    def inputs(self, batch):
        return {"tokens": batch.tokens, "labels": batch.labels}

    def weight(self, batch):
        return batch.weight.sum()

    def loss(self, outputs, batch):
        factor = self.factor if (batch.tokens[:, 0] == 511).any() else 1.0
        return -(outputs * batch.weight).sum() * factor
'''
BATCH = 4  # sequences of a step


@pytest.fixture
def watched(run_yaml, tmp_path, monkeypatch):
    """Writes a run of 16 steps, each with 4 new rows; `bad` is the row that breaks the loss."""
    (tmp_path / "watch_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)

    def write(name, *, bad=-1, without=(), factor=0.0, watch=None, length=16, dtype="float32", dropout=0.0, save=None):
        rows = {"type": "watch_parts:Rows", "bad": bad, "without": list(without)}
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            data={"train": rows, "validation": None, "sequence_length": 32, "shuffle": False},
            objective={"type": "watch_parts:Broken", "factor": factor},
            model={"num_hidden_layers": 1, "hidden_dropout": dropout},
            training={"steps": length, "dtype": dtype, "batch_tokens": BATCH * 32, "micro_batch_size": 2, "threads": 1},
            schedule={"type": "constant", "warmup_steps": 2},
            checkpoint={"every": 5} | (save or {}),
            callbacks=[{"type": "ema", "decay": 0.9}],
            log=QUIET,
        )
        with file.open("a") as out:
            out.write(f"watch: {json.dumps(watch or {})}\n")
        return file, tmp_path / "runs" / name

    return write


SPIKES = {"window": 8, "factor": 20.0}


@pytest.mark.parametrize(
    ("factor", "watch", "kind", "save"),
    [
        (0.0, {"non_finite": "rollback"}, "non-finite", {}),
        (50.0, {"spike": SPIKES | {"action": "rollback"}}, "spike", {"mode": "async"}),
        pytest.param(
            *(0.0, {"non_finite": "rollback"}, "non-finite"),
            {"mode": "async", "local": {"steps": 1, "directory": "local"}},
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_rollback_equals_a_run_that_never_had_the_data(watched, factor, watch, kind, save, capsys):
    """The update of step 9 is bad: back to the checkpoint of step 5, without the data of updates 6 to 9."""
    file, run = watched("bad", bad=8 * BATCH + 1, factor=factor, watch=watch, save=save)
    assert train(file) == 0
    said = capsys.readouterr().err
    assert "step 9" in said
    assert "samples of this batch: 32 to 35" in said
    clean, straight = watched("clean", without=(5 * BATCH, 9 * BATCH))
    assert train(clean) == 0
    assert losses(run) == losses(straight)
    assert_same_weights(run, straight)
    assert [(e["step"], e["event"], e["action"], e["samples"]) for e in read_events(run)] == [
        (9, kind, "rollback", [32, 35])
    ]


@pytest.mark.long
def test_a_run_that_is_stopped_after_a_rollback_goes_on_to_the_same_bits(watched):
    """Also from the checkpoint to which it returned: that is saved again with the skipped data."""
    settings = {"bad": 8 * BATCH, "dropout": 0.1, "watch": {"non_finite": "rollback"}}
    file, straight = watched("straight", **settings)
    assert train(file) == 0
    file, run = watched("broken", **settings)
    assert train(file, "training.steps=9") == 0  # the run continues after a rollback at its last step
    assert json.loads((checkpoints(run)[-2] / "state.json").read_text())["watch"]["skipped_data"] == [[5, 4]]
    assert train(file) == 0
    assert losses(run) == losses(straight)
    assert_same_weights(run, straight)
    assert len(read_events(run)) == 1


def test_a_rollback_to_a_damaged_checkpoint_deletes_nothing(watched, capsys):
    """Step 12 is bad, and the run returns to the checkpoint before the newest, which is damaged."""
    file, run = watched("damaged", bad=11 * BATCH, watch={"non_finite": "rollback", "rollback_checkpoints": 2})
    assert train(file, "training.steps=10") == 0
    older, newer = checkpoints(run)
    file_of_it = next(older.glob("*.safetensors"))
    content = bytearray(file_of_it.read_bytes())
    content[-1] ^= 1
    file_of_it.write_bytes(content)
    assert train(file) == 2
    assert file_of_it.name in capsys.readouterr().err
    assert checkpoints(run) == [older, newer]


@pytest.mark.parametrize("action", ["rollback", pytest.param("skip", marks=pytest.mark.long)])
def test_a_run_with_bad_data_is_reproduced_bit_by_bit(watched, action, capsys):
    """From the start, and from a checkpoint before and after the data that the run skipped."""
    file, run = watched("often", bad=7 * BATCH, dropout=0.1, watch={"non_finite": action})
    assert train(file, "checkpoint.keep_last=9") == 0
    capsys.readouterr()
    for options, steps in (([], 16), (["--from", "5"], 11), (["--from", "10"], 6)):
        assert main(["reproduce", str(run), *options]) == 0
        assert f"gradient norm of {steps} logged steps" in capsys.readouterr().out


def test_several_rollbacks_then_the_run_stops(watched, capsys):
    """The row comes again in the next epoch, at each of which the run returns, until it may no longer."""
    file, run = watched("often", bad=2, watch={"non_finite": "rollback", "max_rollbacks": 2}, length=80)
    assert train(file) == 1
    actions = [event["action"] for event in read_events(run)]
    assert actions == ["rollback", "rollback", "stop"]
    assert "checkpoint of step" in capsys.readouterr().err
    # The first batch was bad, before any checkpoint but that of the initial weights.
    assert read_events(run)[0]["step"] == 1


@pytest.mark.xdist_group("ranks")
def test_two_ranks_skip_the_same_update(watched, ranks):
    """Only one of the ranks reads the bad row."""
    settings = {"bad": 6 * BATCH + 3, "watch": {"non_finite": "skip"}, "dtype": "float64", "length": 9}
    file, run = watched("one", **settings)
    assert train(file) == 0
    file, two = watched("two", **settings)
    ranks.run(file, 2)
    for folder in (run, two):
        assert [(e["step"], e["action"]) for e in read_events(folder)] == [(7, "skip")]
    assert [step for step, *_ in losses(two)] == list(range(1, 10))
    for (_, one, _), (_, other, _) in zip(losses(run), losses(two), strict=True):
        assert (one is None and other is None) or one == pytest.approx(other, abs=1e-10)


def test_a_spike_is_reported_and_stops_the_run_only_if_asked(watched, capsys):
    file, run = watched("warns", bad=8 * BATCH, factor=50.0, watch={"spike": SPIKES})
    assert train(file) == 0
    assert "step 9: the loss is a spike" in capsys.readouterr().err
    assert len(losses(run)) == 16
    file, run = watched("stops", bad=8 * BATCH, factor=50.0, watch={"spike": SPIKES | {"action": "stop"}})
    assert train(file) == 1
    assert checkpoints(run)[-1].name == "step-00000008"
    assert "The update was not made" in capsys.readouterr().err


def test_more_rollback_checkpoints_than_are_kept_are_refused(watched, capsys):
    file, _ = watched("many", watch={"rollback_checkpoints": 3})
    assert train(file) == 2
    said = capsys.readouterr().err
    assert "watch.rollback_checkpoints" in said
    assert "checkpoint.keep_last" in said
