"""The z-loss against the same loss computed from all logits, by an objective of the test's own."""

import pytest
import torch
from running import QUIET, metrics, replaced, train, weights
from torch import nn

from weft.objectives import Loss, Objective

Z = 0.3
SIZES = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.3,
}


class FromLogits(Objective):
    """Chowdhery et al., 2022: cross-entropy + z log(Z)^2, from all logits."""

    scalars = ("squares",)

    def inputs(self, batch):
        return {"tokens": batch.tokens, "positions": batch.positions, "segments": batch.segments}

    def loss(self, outputs, batch):
        log_z = outputs.exp().sum(-1).log()
        chosen = outputs.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
        squares = (log_z.square() * batch.weight).sum()
        total = ((log_z - chosen) * batch.weight).sum() + Z * squares
        return Loss(total, {"squares": (squares, batch.weight.sum())})


class Likely:
    """The mean probability of the labels: a metric sees their log-probabilities, with or without a z-loss."""

    scalars = ("likely",)

    def outputs(self, outputs, batch):
        return {"likely": ((outputs.exp() * batch.weight).sum(), batch.weight.sum())}


class Bigram(nn.Module):
    """A model of the user's own, which returns logits."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.fixture
def run(run_yaml, tmp_path):
    def one(name, model, objective, **training):
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            model=None,
            tokenizer=None,
            data=None,
            objective=None,
            schedule={"type": "constant", "warmup_steps": 0},
            validation={"every": 3},
            training={"steps": 3, "batch_tokens": 128, "dtype": "float64", "micro_batch_size": 2, **training},
            log={"metrics": [{"type": "test_z_loss:Likely"}] if "z_loss" in objective else [], **QUIET},
        )
        data = {"type": "matrix_parts:Sequences", "masked": "type" not in model}
        data = {"train": data, "validation": data | {"count": 4}, "sequence_length": 32}
        assert train(replaced(file, model=model, data=data, objective=objective)) == 0
        return tmp_path / "runs" / name

    return one


@pytest.mark.parametrize(
    "model", [SIZES | {"logit_softcap": 5.0}, {"type": "test_z_loss:Bigram"}], ids=["decoder", "own"]
)
def test_it_is_that_of_all_logits(run, model, monkeypatch):
    monkeypatch.syspath_prepend("tests/parallel")
    full = run("full", model, {"type": "test_z_loss:FromLogits"})
    found = run("found", model, {"type": "pretrain", "z_loss": Z})
    for one, other in zip(metrics(full), metrics(found), strict=True):
        assert other["z_loss"] == pytest.approx(Z * one["squares"], rel=1e-9)
        assert other["loss"] + other["z_loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-9)
        assert 0 < other["likely"] < 0.2
    assert other["validation_loss"] + other["validation_z_loss"] == pytest.approx(one["validation_loss"], rel=1e-9)
    if "type" not in model:
        after = weights(full)
        for name, value in weights(found).items():
            torch.testing.assert_close(value, after[name], rtol=0, atol=1e-10, msg=name)
