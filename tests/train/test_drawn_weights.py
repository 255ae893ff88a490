"""Only weights that nothing fills are drawn: not those of a checkpoint, neither on resuming nor with `model.from`."""

import pytest
from running import QUIET, losses, replaced, train

from weft.models import initialize

SHORT = {
    "data": {"validation": None},
    "schedule": {"type": "constant", "warmup_steps": 0},
    "checkpoint": {"every": 2},
    "log": QUIET,
}


@pytest.fixture
def drawn(monkeypatch):
    """The shapes of the parameters that were drawn."""
    shapes, fill = [], initialize.fill_normal

    def record(out, std, seed, start, shape):
        shapes.append(tuple(shape))
        fill(out, std, seed, start, shape)

    monkeypatch.setattr(initialize, "fill_normal", record)
    return shapes


def run(run_yaml, name, steps=2, **changes):
    changes = SHORT | {"run": {"name": name}, "training": {"steps": steps, "batch_tokens": 256}} | changes
    return run_yaml(f"{name}.yaml", **changes)


def test_a_checkpoint_is_not_drawn_over(run_yaml, drawn, tmp_path):
    assert train(run(run_yaml, "straight", 4)) == 0
    whole = sorted(drawn)
    assert train(run(run_yaml, "broken", 2)) == 0
    drawn.clear()
    assert train(run(run_yaml, "broken", 4)) == 0
    assert not drawn
    assert losses(tmp_path / "runs" / "broken") == losses(tmp_path / "runs" / "straight")

    source = {"from": str(tmp_path / "runs" / "straight"), "preset": None}
    assert train(run(run_yaml, "tuned", model=source)) == 0
    assert not drawn
    # Multi-token prediction layers are new: the checkpoint has none.
    assert train(run(run_yaml, "predicts", model=source | {"num_nextn_predict_layers": 1})) == 0
    assert 0 < len(drawn) < len(whole)
    assert (512, 64) not in drawn


def test_a_frozen_model_is_not_drawn_over(run_yaml, drawn, tmp_path):
    assert train(run(run_yaml, "teacher")) == 0
    whole = sorted(drawn)
    drawn.clear()
    teacher = {"type": "distill", "teacher": str(tmp_path / "runs" / "teacher")}
    assert train(run(run_yaml, "student", objective=teacher)) == 0
    assert sorted(drawn) == whole


def test_a_model_of_transformers_without_weights_is_drawn_once(hf_folder, run_yaml, tmp_path, monkeypatch):
    from weft.parallel import apply

    seeds, build = [], apply.build_transformers_model

    def record(section, *, seed):
        seeds.append(seed)
        return build(section, seed=seed)

    monkeypatch.setattr(apply, "build_transformers_model", record)
    model = {"type": "hf", "path": str(hf_folder), "weights": False}
    for name, steps in (("straight", 4), ("broken", 2), ("broken", 4)):
        assert train(replaced(run(run_yaml, name, steps, model=None), model=model)) == 0
    assert seeds == [7, 7, None]
    assert losses(tmp_path / "runs" / "broken") == losses(tmp_path / "runs" / "straight")
