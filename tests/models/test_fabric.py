"""A model of Weft trains in Lightning's Fabric as in a plain loop, to the bit."""

import importlib

import pytest
import torch

from weft.config.model import ModelSection
from weft.models.build import build_model

SECTION = ModelSection(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)


def train(model, optimizer, backward):
    tokens = torch.randint(64, (3, 4, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in tokens:
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def model():
    torch.manual_seed(3)
    made = build_model(SECTION)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.1)
    return made


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_in_fabric(precision):
    names = [name for name in ("lightning.fabric", "lightning_fabric") if importlib.util.find_spec(name.split(".")[0])]
    if not names:
        pytest.skip("neither lightning nor lightning-fabric is installed")
    fabric = importlib.import_module(names[0]).Fabric(accelerator="cpu", devices=1, precision=precision)
    one, two = model(), model()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
        plain = train(one, torch.optim.AdamW(one.parameters(), lr=1e-2), lambda loss: loss.backward())
    wrapped, optimizer = fabric.setup(two, torch.optim.AdamW(two.parameters(), lr=1e-2))
    assert train(wrapped, optimizer, fabric.backward) == pytest.approx(plain, rel=1e-2 if precision != "32-true" else 0)
    if precision == "32-true":
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
