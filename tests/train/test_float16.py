"""Training in float16: the loss is scaled, an overflow skips the update, and a resumed run is the run."""

import json
import math
from itertools import pairwise

import pytest
import torch
from running import QUIET, assert_same_weights, losses, metrics, train, weights
from torch import nn

from weft.config.training import TrainingSection
from weft.observe.metrics import read_metrics
from weft.parallel.gradients.scaling import LossScale

STEPS = 12


@pytest.fixture
def float16_run(run_yaml, tmp_path):
    def write(name, *, steps=STEPS, training=None, model=None, **more):
        settings = {"steps": steps, "dtype": "float16", "batch_tokens": 256, "micro_batch_size": 2} | (training or {})
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            model={"num_hidden_layers": 1} | (model or {}),
            data={"validation": None},
            training=settings,
            schedule={"warmup_steps": 2},
            log=QUIET,
            **more,
        )
        return file, tmp_path / "runs" / name

    return write


def test_the_scale_moves_as_pytorchs_own_scaler():
    ours = LossScale(TrainingSection(steps=1, dtype="float16", initial_loss_scale=1024.0, loss_scale_window=3))
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for finite in [True, True, False, True, True, True, True, False, False, True, True, True, True, True, True]:
        theirs.scale(parameter.sum() * (1.0 if finite else math.inf)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(finite)
        assert ours.factor == theirs.get_scale()
    assert ours.skipped == 3


def test_other_dtypes_are_not_scaled():
    scale = LossScale(TrainingSection(steps=1, dtype="bfloat16"))
    scale.update(False)
    assert (scale.factor, scale.may_skip(), scale.metrics(True), scale.state()) == (1.0, False, {}, {})
    assert LossScale(TrainingSection(steps=1, dtype="bfloat16", reduce_dtype="float16")).factor == 65536.0


def test_losses_are_those_of_float32(float16_run):
    half, half_run = float16_run("half", training={"initial_loss_scale": 1024.0})
    full, full_run = float16_run("full", training={"dtype": "float32"})
    assert train(half) == train(full) == 0
    for (_, loss, norm), (_, other_loss, other_norm) in zip(losses(half_run), losses(full_run), strict=True):
        assert loss == pytest.approx(other_loss, rel=5e-3)  # unscaled, as is the norm
        assert norm == pytest.approx(other_norm, rel=5e-2)
    lines = metrics(half_run)
    assert [(line["loss_scale"], line["skipped"]) for line in lines] == [(1024.0, 0)] * STEPS
    assert all("loss_scale" not in line for line in metrics(full_run))


def test_an_overflow_skips_the_update_and_halves_the_scale(float16_run, capsys):
    file, run = float16_run(
        "over", training={"initial_loss_scale": 2.0**30}, checkpoint={"every": 1, "keep_last": STEPS}
    )
    assert train(file) == 0
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))  # a skipped step is a step
    skipped = [line["step"] for line in lines if not math.isfinite(line["grad_norm"])]
    assert 0 < len(skipped) < STEPS
    first = next(n for n, step in enumerate([*skipped, 0]) if step != n + 1)  # skipped steps before the first update
    assert first > 0
    for line in lines:
        before = sum(step < line["step"] for step in skipped)
        assert line["loss_scale"] == 2.0 ** (30 - before)
        assert line["skipped"] == before + (line["step"] in skipped)
    assert lines[-1]["skipped"] == len(skipped)
    assert all(math.isfinite(line["loss"]) for line in lines)
    folder = run / "checkpoints"
    assert_same_weights(folder / "step-00000001", folder / f"step-{first:08}")
    one, other = (weights(folder / f"step-{step:08}") for step in (first, first + 1))
    assert any(not torch.equal(value, one[name]) for name, value in other.items())
    said = capsys.readouterr().err
    assert said.count("the update is skipped and the loss scale halved") == 1
    assert said.splitlines()[-1].startswith(f"{len(skipped)} updates were skipped")


def test_the_run_ends_where_no_scale_is_small_enough(float16_run, capsys):
    # Weights of 1e4 overflow in the forward, whatever the loss is multiplied by.
    file, run = float16_run("broken", steps=8, model={"initializer_range": 1e4}, training={"initial_loss_scale": 4.0})
    assert train(file) != 0
    assert [line["loss_scale"] for line in metrics(run)] == [4.0, 2.0]
    assert "not finite" in capsys.readouterr().err
    assert json.loads((run / "checkpoints" / "step-00000002" / "state.json").read_text())["loss_scale"]["skipped"] == 2


def test_a_resumed_run_is_the_run(float16_run):
    """The scale is found, doubled and found again, with interruptions in between."""
    settings = {"initial_loss_scale": 2.0**27, "loss_scale_window": 2}
    whole, whole_run = float16_run("whole", steps=12, training=settings, checkpoint={"every": 3})
    parts, parts_run = float16_run("parts", steps=12, training=settings, checkpoint={"every": 3})
    for steps in (4, 9, 12):
        assert train(parts, f"training.steps={steps}", "schedule.type=constant") == 0
    assert train(whole, "schedule.type=constant") == 0
    assert losses(parts_run) == losses(whole_run)
    scales = [line["loss_scale"] for line in metrics(parts_run)]
    assert scales == [line["loss_scale"] for line in metrics(whole_run)]
    assert any(later > earlier for earlier, later in pairwise(scales))
    assert_same_weights(parts_run, whole_run)
