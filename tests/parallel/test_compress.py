"""PowerSGD between copies: what it tells is what it should, on any mesh, and across a resume."""

import numpy as np
import pytest
import torch
from compare import Run, compare
from compress_parts import COLUMNS, ROWS, fit_counting, sums
from matrix import WITHIN, Case, ranks_of, write_run

from weft.config.run import RunConfig
from weft.errors import UserError

pytestmark = pytest.mark.xdist_group("ranks")

COPIES = {"dp_replicate": 2, "dp_shard": 2}


def compressed(rank=2, start_step=0):
    return {"compress": {"rank": rank, "start_step": start_step}}


@pytest.mark.parametrize(
    ("parallel", "rank"),
    [
        pytest.param({"dp_replicate": 2}, 3, id="2 copies"),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, 3, id="2 copies of 2 shards"),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, COLUMNS, id="full rank: as it is"),
    ],
)
def test_a_sum_of_no_higher_rank_is_sent_exactly(runner, parallel, rank):
    parallel = {"dp_shard": 1} | parallel
    for found in runner.pool.call(sums, ranks_of(parallel), parallel, rank, 3 if rank == 3 else COLUMNS, 3):
        for step in found:
            torch.testing.assert_close(step["matrix"], step["sum"], rtol=0, atol=WITHIN)
            torch.testing.assert_close(step["bias"], step["bias_sum"], rtol=0, atol=WITHIN)
        assert (found[0]["share"] == 1) == (rank == COLUMNS)
    if rank == 3:  # P and Q of the matrix, and the bias
        assert found[0]["share"] == pytest.approx((3 * (ROWS + COLUMNS) + ROWS) / (ROWS * COLUMNS + ROWS))


def test_what_is_sent_is_a_projection_and_the_rest_is_kept(runner):
    one, *others = runner.pool.call(sums, 4, COPIES, 2, 8, 4)
    left = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for number, step in enumerate(one):
        told, wanted = step["matrix"], step["sum"] + left
        assert torch.linalg.matrix_rank(told, atol=WITHIN) == 2
        torch.testing.assert_close(
            (wanted - told) @ told.T, torch.zeros(ROWS, ROWS, dtype=told.dtype), rtol=0, atol=1e-9
        )
        left = sum(
            {
                name: kept for rank in (one, *others) for name, kept in rank[number]["kept"].items() if "error" in name
            }.values()
        )
        torch.testing.assert_close(left, wanted - told, rtol=0, atol=WITHIN)
        for other in others:
            assert torch.equal(told, other[number]["matrix"])  # to the bit: copies must not drift apart


def test_what_is_not_finite_is_not_kept(runner):
    whole = runner.pool.call(sums, 4, COPIES, 2, 8, 4, 2)
    for found in whole:
        assert [np.isfinite(step["norm"]) for step in found] == [True, True, False, True]
        for name, kept in found[1]["kept"].items():
            assert torch.equal(kept, found[2]["kept"][name])


@pytest.mark.parametrize("mesh", [{"dp_replicate": 4}, {"dp_replicate": 2, "tp": 2}], ids=str)
@pytest.mark.long
def test_every_mesh_tells_the_same(runner, mesh):
    """A compressed gradient is a function of the whole one: not of how the copies are made."""
    expected = runner.run(
        Case("dense", "accumulation", {"dp_replicate": 2}, 2), name="two-copies", parallel=compressed()
    )
    exact = runner.reference(Case("dense", "accumulation", layers=2))
    assert compare(exact, expected).gradient > 1e-3
    difference = compare(expected, runner.run(Case("dense", "accumulation", mesh, 2), parallel=compressed()))
    assert difference.largest <= WITHIN, difference.wrong()


MORE = [{"dp_replicate": 2, axis: 2} for axis in ("pp", "dp_shard", "cp", "tp")] + [COPIES | {"pp": 2, "tp": 2}]
WITH_EXPERTS = [COPIES | {"ep": 2}, {"dp_replicate": 2, "cp": 2, "ep": 2, "tp": 2}]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "mesh"),
    [(model, mesh) for model in ("gqa", "tied") for mesh in MORE] + [("moe", mesh) for mesh in MORE + WITH_EXPERTS],
    ids=str,
)
def test_every_other_mesh_tells_the_same(runner, model, mesh):
    two = Case(model, "accumulation", {"dp_replicate": 2})
    expected = runner.run(two, name=f"two-{model}", parallel=compressed())
    difference = compare(expected, runner.run(Case(model, "accumulation", mesh), parallel=compressed()))
    assert difference.largest <= WITHIN, difference.wrong()


def test_it_is_exact_before_its_first_step(runner):
    exact = runner.reference(Case("dense", "plain", layers=2))
    run = runner.run(Case("dense", "plain", {"dp_replicate": 2}, 2), name="later", parallel=compressed(start_step=1))
    difference = compare(exact, run)
    assert max(value for (step, _), value in difference.tensors.items() if step < 2 and np.isfinite(value)) <= WITHIN
    assert difference.gradient > 1e-3


def test_a_resumed_run_is_the_run(runner):
    """To the bit: the factors and the errors are saved."""
    options = {"parallel": compressed(start_step=1), "training": {"dtype": "float32"}}
    case = Case("dense", "plain", {"dp_replicate": 2}, 2)
    whole = runner.run(case, steps=3, name="whole", **options)
    for steps in (2, 3):
        parts = runner.run(case, steps=steps, name="parts", fresh=steps == 2, **options)
    assert compare(whole, parts).largest == 0


@pytest.mark.parametrize(
    "meshes",
    [
        [{"dp_replicate": 4}, {"dp_replicate": 2}],
        pytest.param([{"dp_replicate": 4}, {"dp_replicate": 2, "tp": 2}, COPIES], marks=pytest.mark.long),
    ],
    ids=["2", "3"],
)
def test_it_goes_on_with_other_copies(runner, meshes):
    """What was not told yet is shared out anew: the sum over the copies is what counts."""
    stays = Case("dense", "plain", {"dp_replicate": 2}, 2)
    expected = runner.run(stays, steps=len(meshes), name="stays", parallel=compressed())
    for steps, mesh in enumerate(meshes, start=1):
        run = runner.run(
            Case("dense", "plain", mesh, 2), steps=steps, name="moves", fresh=steps == 1, parallel=compressed()
        )
    difference = compare(expected, run)
    assert difference.largest <= WITHIN, difference.wrong()


def test_fewer_bytes_and_a_falling_loss(runner):
    case = Case("dense", "plain", {"dp_replicate": 2}, 2)
    runs, told = {}, {}
    for name, parallel in (("exact", {}), ("rank 2", compressed())):
        options = {"training": {"dtype": "float32"}, "checkpoint": {"every": 12}}
        file = write_run(runner.folder, case, steps=12, name=name, parallel=parallel, **options)
        told[name] = runner.pool.call(fit_counting, 2, file, True, seconds=120)
        runs[name] = Run(runner.folder / name).metrics["loss"]
    assert 0 < max(told["rank 2"]) * 3 < min(told["exact"])
    fell = {name: losses[:3].mean() - losses[-3:].mean() for name, losses in runs.items()}
    assert fell["rank 2"] > 0.7 * fell["exact"] > 0.2


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        pytest.param({"dp_shard": 2}, "parallel.compress: .*dp_replicate", id="one copy"),
        pytest.param(
            {"dp_replicate": 2, "compress": {"start_step": 1000}},
            r"compress.start_step: 1,000, but the run has",
            id="late",
        ),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(runner, parallel, message):
    file = write_run(runner.folder, Case("dense", "plain"), name="refused", parallel=compressed() | parallel)
    with pytest.raises(UserError, match=message):
        RunConfig.load(file)
