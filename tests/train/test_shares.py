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


MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "scoring_func": "sigmoid", "correction_bias": True,
    "router_aux_loss_coef": 10.0, "router_z_loss_coef": 1.0, "capacity_factor": 0.8,
}  # fmt: skip


def documents(rows, length):
    """A batch of sequences of documents, each given as the places of its tokens in the sequence."""
    weight, positions = torch.zeros(len(rows), length), torch.zeros(len(rows), length, dtype=torch.int64)
    tokens, labels = torch.zeros(2, len(rows), length, dtype=torch.int64)
    segments = torch.full_like(tokens, max(map(len, rows)))
    for row, texts in enumerate(rows):
        for number, (first, text) in enumerate(texts):
            part = slice(first, first + len(text) - 1)
            tokens[row, part], labels[row, part], weight[row, part] = text[:-1], text[1:], 1
            weight[row, first] = 0  # a token of the document, without loss
            positions[row, part], segments[row, part] = torch.arange(len(text) - 1), number
    return Batch(tokens, labels, weight, positions, segments, samples=torch.arange(len(rows)))


def step(batch, **moe):
    """The gradients, loads and drops of a step of a batch."""
    section = ModelSection(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, moe=MOE | moe,
    )  # fmt: skip
    model = build_model(section).double().train()
    initialize(model, seed=0)
    passes = Passes(model, Pretrain(), WORLD, ParallelSection())
    passes.train([batch], weight=LEARNED, learned_tokens=LEARNED, seed=lambda sample: 0)
    routers = [layer.mlp.router for layer in model.layers]
    found = {f"load {number}": router.load for number, router in enumerate(routers)}
    found |= {f"drops {number}": router.dropped_counts for number, router in enumerate(routers)}
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


def texts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 32, (length,), generator=generator) for length in lengths]


def assert_same(one, other):
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-12, atol=1e-12, msg=name)


def test_padding_changes_neither_balance_nor_capacity():
    one, two = texts(6, 7)
    plain = step(documents([[(0, one), (5, two)]], 11))
    assert sum(plain[f"drops {number}"].sum() for number in range(2)) > 0
    assert_same(plain, step(documents([[(0, one), (5, two)]], 32)))
    assert_same(plain, step(documents([[(9, one), (14, two)]], 32)))  # padding on the left, too


def test_packing_does_not_change_load_and_bias():
    one, two = texts(6, 7)
    options = {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0, "capacity_factor": None}
    packed = step(documents([[(0, one), (5, two)]], 11), **options)
    assert packed["load 0"].sum() == 2 * 11
    assert_same(packed, step(documents([[(0, one)], [(0, two)]], 20), **options))
