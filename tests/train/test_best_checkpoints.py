"""`checkpoint.keep_best`: the checkpoints with the best validation outlive the newest ones."""

import json
from pathlib import Path

import pytest

import weft
from weft.checkpoint.load import checkpoints
from weft.cli.main import main
from weft.errors import UserError

SHORT = {"training": {"steps": 10, "batch_tokens": 128, "micro_batch_size": 2}}
EVERY = {"every": 2, "tokens": 1024}


def measured(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run)]


def ranked(run: Path, *, worst_first: bool = False) -> list[int]:
    """Steps by the validation loss that the metrics file has of them."""
    values = measured(run)
    return sorted(values, key=values.__getitem__, reverse=worst_first)


@pytest.fixture
def train(tmp_path, run_yaml):
    def fit(name: str, *overrides: str, **checkpoint) -> Path:
        section = {"every": 2, "keep_last": 1, **checkpoint}
        path = run_yaml(**SHORT, validation=EVERY, checkpoint=section, run={"name": name})
        assert main(["train", str(path), *overrides]) == 0
        return tmp_path / "runs" / name

    return fit


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_best_checkpoints_are_kept_beside_the_newest(train, mode):
    # The loss falls, so that with "max" the best are the first ones, which would be deleted otherwise.
    run = train("worst", keep_best=2, best_mode="max", mode=mode)
    best = ranked(run, worst_first=True)[:2]
    assert 10 not in best
    assert steps(run) == sorted({*best, 10})
    assert (run / "checkpoints" / "best").resolve().name == f"step-{best[0]:08d}"


def test_the_best_one_can_be_named_wherever_a_checkpoint_can(train, capsys):
    run = train("one", keep_best=1, best_mode="max")
    best = ranked(run, worst_first=True)[0]
    assert main(["checkpoint", "verify", str(run / "checkpoints" / "best")]) == 0
    assert (
        main(["checkpoint", "diff", str(run / "checkpoints" / "best"), str(run / "checkpoints" / f"step-{best:08d}")])
        == 0
    )
    capsys.readouterr()
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["step"] for one in listed if one["best"]] == [best]
    assert all(one["validation_loss"] == pytest.approx(measured(run)[one["step"]]) for one in listed)
    model = weft.load_model(run / "checkpoints" / "best")
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


def test_a_resumed_run_still_knows_the_best_of_before(train):
    run = train("resumed", "training.steps=4", "schedule={type: constant}", keep_best=1, best_mode="max")
    first = ranked(run, worst_first=True)[0]
    run = train("resumed", "schedule={type: constant}", keep_best=1, best_mode="max")
    assert steps(run) == [first, 10]
    assert main(["checkpoint", "prune", str(run), "--keep-last", "1", "--keep-best", "1"]) == 0
    assert steps(run) == [first, 10]
    assert main(["checkpoint", "prune", str(run), "--keep-last", "1"]) == 0
    assert steps(run) == [10]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"validation": None}, "validation": None}, ("checkpoint.keep_best", "data.validation")),
        ({"checkpoint": {"every": 3}}, ("checkpoint.every", "validation.every")),
        ({"checkpoint": {"best_mode": "lowest"}}, ("checkpoint.best_mode", "min")),
    ],
)
def test_settings_that_cannot_find_the_best_are_refused(run_yaml, changes, words):
    sections = {**SHORT, "validation": EVERY, **changes}
    sections["checkpoint"] = {"every": 2, "keep_best": 1} | changes.get("checkpoint", {})
    with pytest.raises(UserError) as caught:
        weft.RunConfig.load(run_yaml(**sections))
    assert all(word in str(caught.value) for word in words)


def test_a_metric_that_no_validation_has_ends_the_run_with_the_names_that_there_are(run_yaml, capsys):
    path = run_yaml(**SHORT, validation=EVERY, checkpoint={"every": 2, "keep_best": 1, "best_metric": "accuracy"})
    assert main(["train", str(path)]) == 2
    message = capsys.readouterr().err
    assert "checkpoint.best_metric" in message
    assert "validation_loss" in message
