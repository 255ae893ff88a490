"""Callbacks and metrics on several ranks: what they find and keep is that of one process."""

import json

import pytest
from compare import Run, compare
from matrix import WITHIN, Case, ranks_of, write_run

DATA = {"type": "matrix_parts:Sequences", "masked": True}
STEPS = 3


def train(runner, name, mesh, *, fresh=True):
    """Rank 1, where there is one, stops it after each step; without `fresh` it goes on from there."""
    callbacks = [{"type": "ema", "decay": 0.6, "validate": True}, {"type": "callback_parts:StopOn", "rank": 1}]
    file = write_run(
        runner.folder,
        Case("tied", "plain", mesh, layers=2),
        steps=STEPS,
        name=name,
        data={"train": DATA, "validation": {**DATA, "count": 7}},
        training={"batch_tokens": 10 * 32, "micro_batch_size": 2},
        validation={"every": 1, "micro_batch_size": 2},
        log={"metrics": ["callback_parts:Likely"]},
    )
    with file.open("a") as out:
        print(f"callbacks: {json.dumps(callbacks)}", file=out)
    runner.pool.run(file, ranks_of(mesh), fresh=fresh, seconds=60)
    return Run(runner.folder / name)


def found(run):
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return [[line[name] for name in ("likely", "sample", "validation_likely", "validation_loss")] for line in lines]


@pytest.mark.parametrize(
    "first", [{"dp_shard": 2}, pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.long)], ids=str
)
def test_from_mesh_to_mesh_an_average_and_metrics_are_those_of_one_process_and_one_rank_stops_all(runner, first):
    one = train(runner, "callbacks-alone", {})
    for step, mesh in enumerate((first, {"pp": 2, "cp": 2}, {}), start=1):
        run = train(runner, "callbacks-from-mesh-to-mesh", mesh, fresh=step == 1)
        ended = [(run.path / f"ended-{rank}").read_text() for rank in range(ranks_of(mesh))]
        assert ended == [f"{step} {'finished' if step == STEPS else 'stopped-early'}"] * ranks_of(mesh)
        assert run.metrics["step"].tolist() == list(range(1, step + 1))
        assert (run.path / "checkpoints" / f"step-{step:08}").is_dir()
    difference = compare(one, run)
    assert difference.largest <= WITHIN, difference.wrong()
    averages = [value for (_, name), value in difference.tensors.items() if name.startswith("callback/ema/")]
    assert len(averages) > 10
    assert max(averages) <= WITHIN
    for line, other in zip(found(one), found(run), strict=True):
        assert other == pytest.approx(line, rel=0, abs=WITHIN)
