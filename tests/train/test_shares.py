"""What the balance of experts weighs in a step: each sequence's share of the tokens that are learned from."""

from types import SimpleNamespace

import torch

from weft.config.mesh import MeshShape, ParallelSection
from weft.config.model import ModelSection
from weft.data.batches.batch import Batch
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.objectives.pretrain import Pretrain
from weft.parallel.passes import Passes

WORLD = SimpleNamespace(device=torch.device("cpu"), shape=MeshShape())
LEARNED = 11  # of the step; no power of two, so a share is rounded in whatever dtype it has


def test_in_float64_they_are_as_precise_as_the_rest():
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 10.0}
    section = ModelSection(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, moe=moe)
    model = build_model(section).double().train()
    initialize(model, seed=0)
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    weight = torch.ones(2, 8)
    weight[1, 3:] = 0  # 8 and 3 tokens
    batch = Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        weight=weight,
        positions=torch.arange(8).expand(2, 8),
        segments=None,
        samples=torch.arange(2),
    )
    passes = Passes(model, Pretrain(), WORLD, ParallelSection())
    passes.train([batch], weight=LEARNED, learned_tokens=LEARNED, seed=lambda sample: 0)
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    shares = torch.tensor([8 / LEARNED, 3 / LEARNED], dtype=torch.float64)
    logprobs = model(batch.tokens, batch.positions, labels=batch.labels, loss_weights=shares)
    (-(logprobs * weight).sum() / LEARNED).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-13, atol=1e-13, msg=name)
