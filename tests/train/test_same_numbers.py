"""Choices that save memory or time change no result."""

import pytest
import torch
from running import QUIET, assert_same_weights, losses, train


@pytest.fixture
def both(run_yaml, tmp_path):
    """Runs the same few steps twice, the second time with a change; gives both run directories."""

    def run(change, *, steps=3, model=None, **training):
        for name, extra in (("plain", {}), ("changed", change)):
            file = run_yaml(
                run={"name": name},
                model={"hidden_dropout": 0.1 if training["dtype"] == "float64" else 0.0} | (model or {}),
                data={"validation": None},
                schedule={"warmup_steps": 1},
                training={"steps": steps, "batch_tokens": 512} | training | extra,
                log=QUIET,
            )
            assert train(file) == 0
        return tmp_path / "runs" / "plain", tmp_path / "runs" / "changed"

    return run


def test_activation_checkpointing_changes_nothing(both):
    plain, changed = both({"activation_checkpointing": "full"}, dtype="float64")
    for one, other in zip(losses(plain), losses(changed), strict=True):
        assert one == pytest.approx(other, rel=0, abs=1e-12)
    assert_same_weights(plain, changed, within=1e-12)


# As GPT-NeoX has it: two biases with one gradient, which Inductor's code for CPUs once declared twice.
SIDE_BY_SIDE = {"num_hidden_layers": 1, "use_parallel_residual": True, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    ("model", "dtype", "backend"),
    [
        # All but the C++ compiler. (`test_compiled_blocks.py` has blocks that are only traced.)
        pytest.param(SIDE_BY_SIDE, "float32", "aot_eager", id="neox-traced", marks=pytest.mark.long),
        pytest.param(SIDE_BY_SIDE, "float32", None, id="neox", marks=pytest.mark.long),
        pytest.param({}, "float32", None, id="llama", marks=pytest.mark.long),
        pytest.param(SIDE_BY_SIDE, "bfloat16", None, id="neox-bfloat16", marks=pytest.mark.long),
    ],
)
def test_compiled_blocks_give_the_same_losses(both, monkeypatch, model, dtype, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if backend is not None:
        compile = torch.compile
        monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend=backend))
    plain, changed = both({"compile": True}, model=model, dtype=dtype)
    for (_, loss, norm), (_, compiled_loss, compiled_norm) in zip(losses(plain), losses(changed), strict=True):
        assert loss == pytest.approx(compiled_loss, abs=1e-5 if dtype == "float32" else 0.01)
        assert norm == pytest.approx(compiled_norm, rel=1e-4 if dtype == "float32" else 0.02)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # and it was compiled
