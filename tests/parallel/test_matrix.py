"""A run on any mesh is the run of one process: equal losses, gradients and weights, three steps, in float64."""

import numpy as np
import pytest
from compare import compare
from matrix import LARGER_SAMPLE, SAMPLE, WITHIN, Case, matrix, mesh_name, unknown

# Queries' and keys' product with one vector for all keys is the same for each: softmax does not see it.
WITHOUT_GRADIENT = "k_proj.bias"


def row(case, *marks):
    """A case as a parameter; one of a mesh that this version does not know is skipped."""
    reason = unknown(case.mesh)
    skipped = [pytest.mark.skip(reason=f"there is no {reason}")] if reason else []
    return pytest.param(case, id=str(case), marks=[*marks, *skipped])


def check(runner, case, record_property):
    difference = runner.compare(case)
    largest = [difference.loss, difference.gradient, difference.weight]
    record_property("difference", {"mesh": mesh_name(case.mesh), "model": case.model, "largest": largest})
    assert difference.good, f"{case}: {difference.wrong()}"


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "case", [*(row(case) for case in SAMPLE), *(row(case, pytest.mark.long) for case in LARGER_SAMPLE)]
)
def test_a_sample_of_the_matrix(runner, case, record_property):
    check(runner, case, record_property)


@pytest.mark.matrix
@pytest.mark.parametrize("case", [row(case) for case in matrix()])
def test_the_matrix(runner, case, record_property):
    check(runner, case, record_property)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "case", [Case("tied", "masked"), pytest.param(Case("moe", "everything"), marks=pytest.mark.long)], ids=str
)
def test_what_is_compared_says_something(runner, case):
    run = runner.reference(case)
    gradients = {name: value for name, value in run.steps[-1].items() if name.endswith(".gradient")}
    assert len(gradients) > 30
    for name, value in gradients.items():
        assert np.abs(value).max() > 1e-6 or WITHOUT_GRADIENT in name, name
    moved = compare(run, runner.reference(Case(case.model, "uneven")))
    assert min(moved.loss, moved.gradient, moved.weight) > 1e-3


@pytest.mark.xdist_group("ranks")
def test_micro_batches_add_up_to_the_batch(runner):
    difference = compare(*(runner.reference(Case("dense", way, layers=2)) for way in ("plain", "accumulation")))
    assert difference.largest <= WITHIN, difference.wrong()
    for case in (Case("tied", "sft_sequences", layers=2), Case("gqa", "kto", layers=2)):
        one_by_one = runner.run(case, name=f"{case.way}-one-by-one", training={"micro_batch_size": 1})
        difference = compare(runner.reference(case), one_by_one)
        assert difference.largest <= WITHIN, difference.wrong()
    assert one_by_one.metrics["kl"].max() > 0  # of the whole batch
