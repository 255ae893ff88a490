"""Dtypes of computing, of state and of sums, on one process and on many."""

import numpy as np
import pytest
import torch
from compare import Run
from compress_parts import fit_counting
from matrix import Case, write_run

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.observe.metrics import read_metrics

pytestmark = pytest.mark.xdist_group("ranks")


def run(runner, name, mesh=None, *, model="dense", steps=2, every=1, **training):
    case = Case(model, "plain", mesh or {}, layers=2)
    return runner.run(case, steps=steps, name=name, training=training, checkpoint={"every": every})


def gradients(run: Run, step: int = 0) -> dict[str, np.ndarray]:
    return {name: value for name, value in run.steps[step].items() if name.endswith(".gradient")}


def rounds(values: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether `dtype` lacks some of the values."""
    tensor = torch.from_numpy(values)
    return not torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def test_weights_and_gradients_are_kept_in_float32(runner):
    made = run(runner, "bfloat16", {"dp_shard": 2}, dtype="bfloat16")
    for name, value in made.steps[-1].items():
        assert value.dtype == np.float32, name
    assert any(rounds(value, torch.bfloat16) for name, value in made.steps[-1].items() if name.startswith("model."))
    assert any(rounds(value, torch.bfloat16) for value in gradients(made).values())  # summed in float32


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [
        ({}, "bfloat16"),
        ({"dp_shard": 2}, "float16"),
        pytest.param({"dp_replicate": 2}, "bfloat16", marks=pytest.mark.long),
        ({"tp": 2}, "bfloat16"),
    ],
    ids=str,
)
def test_gradients_are_summed_as_said(runner, mesh, dtype):
    exact = run(runner, "exact", mesh, dtype="float32", steps=1)
    summed = run(runner, "summed", mesh, dtype="float32", reduce_dtype=dtype, initial_loss_scale=scale(dtype), steps=1)
    for (name, gradient), wanted in zip(gradients(summed).items(), gradients(exact).values(), strict=True):
        assert gradient.dtype == np.float32
        assert not rounds(gradient * (scale(dtype) or 1), getattr(torch, dtype)), name
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=0.02 * np.abs(wanted).max(), err_msg=name)


def scale(dtype: str) -> float | None:
    return 1024.0 if dtype == "float16" else None


def test_half_the_bits_are_half_the_bytes(runner):
    told = {}
    for dtype in ("float32", "bfloat16"):
        training = {"dtype": "float32", "reduce_dtype": dtype}
        file = write_run(runner.folder, Case("dense", "plain", {"dp_replicate": 2}, 2), name=dtype, training=training)
        told[dtype] = max(runner.pool.call(fit_counting, 2, file, True))
    assert told["bfloat16"] == pytest.approx(told["float32"] / 2, rel=0.01)


OVERFLOWING = {"steps": 6, "every": 6, "dtype": "float16", "initial_loss_scale": 2.0**20}


@pytest.fixture(scope="module")
def overflowing_alone(runner):
    return read_metrics(run(runner, "alone", **OVERFLOWING).path)


@pytest.mark.parametrize(
    "mesh",
    [
        {"pp": 2},
        *(
            pytest.param(mesh, marks=pytest.mark.long)
            for mesh in ({"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2, "compress": {"start_step": 1, "rank": 2}})
        ),
    ],
    ids=str,
)
def test_an_overflow_is_seen_by_all_ranks(runner, overflowing_alone, mesh):
    alone, shared = overflowing_alone, read_metrics(run(runner, "shared", mesh, **OVERFLOWING).path)
    assert 0 < alone[-1]["skipped"] < 5
    assert abs(alone[-1]["skipped"] - shared[-1]["skipped"]) <= 1  # parts of a sum may fit where the sum does not
    assert np.isfinite(shared[-1]["grad_norm"])
    assert shared[-1]["loss"] < shared[0]["loss"]


def test_the_balance_of_experts_is_scaled_with_the_loss(runner):
    training = {"dtype": "float32"}
    exact = run(runner, "unscaled", model="moe", steps=1, **training)
    scaled = run(runner, "scaled", model="moe", steps=1, reduce_dtype="float16", initial_loss_scale=1024.0, **training)
    for (name, gradient), wanted in zip(gradients(scaled).items(), gradients(exact).values(), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=2e-3 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"dtype": "bfloat16", "initial_loss_scale": 4.0},
            "training.initial_loss_scale: .*float16.*bfloat16; remove the key",
        ),
        ({"dtype": "float32", "fp8": True}, "training.dtype: .*bfloat16"),
        ({"dtype": "float16", "initial_loss_scale": 0.5}, "training.initial_loss_scale: must be at least 1"),
    ],
)
def test_keys_without_a_meaning_are_refused(tmp_path, training, message):
    with pytest.raises(UserError, match=message):
        RunConfig.load(write_run(tmp_path, Case("dense", "plain"), name="refused", training=training))
