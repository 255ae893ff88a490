"""Parts of the user's own, written to `my_parts.py`, and small decoders made with them."""

import pytest
import torch

from weft.config.model import ModelSection
from weft.models.build import build_model
from weft.models.initialize import initialize

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
PATTERNS = [
    {"type": "sliding", "window": 5},
    {"type": "fixed", "stride": 4, "expressivity": 2},
    {"type": "strided", "stride": 4},
    {"type": "bigbird", "block_size": 2, "window": 2, "random_blocks": 1},
    {"type": "longformer", "window": 4, "global_tokens": 2},
    {"type": "my_parts:Odd", "step": 2},
]
PARTS = '''
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    """RMSNorm as in a textbook."""

    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gain


class Noisy(Norm):
    """Of which every layer begins elsewhere."""

    def __init__(self, width, eps):
        super().__init__(width, eps)
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(width))


class Act(nn.Module):
    """silu with a slope that is learned."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.full((1,), 1.0))

    def forward(self, x):
        return x * torch.sigmoid(self.slope * x)


class Learned(nn.Module):
    """A table, added."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embed(self, x, positions):
        return x + self.table(positions)


class Complex(nn.Module):
    """Rotations as products of complex numbers, of frequencies in a buffer."""

    def __init__(self, config):
        super().__init__()
        half = config.rotary_dim // 2
        self.register_buffer("freqs", config.rope_theta ** (-torch.arange(half).double() / half), persistent=False)

    def forward(self, q, k, positions):
        angles = (positions.unsqueeze(-1) * self.freqs).unsqueeze(1)
        turns = torch.complex(angles.cos(), angles.sin())

        def turn(x):
            first, second = x.double().chunk(2, -1)
            out = torch.complex(first, second) * turns
            return torch.cat((out.real, out.imag), -1)

        return turn(q), turn(k)


class Attention:
    """All scores, written out."""

    def __init__(self, config):
        self.scale = config.qk_head_dim**-0.5

    def __call__(self, q, k, v, mask):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * self.scale
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


class Normal:
    """N(0, initializer_range), as `normal`."""

    def __call__(self, name, shape, role, generator, config):
        assert role in ("embedding", "head", "matrix"), (name, role)
        return torch.randn(shape, generator=generator) * config.initializer_range


class Flat:
    def __call__(self, name, shape, role, generator, config):
        return torch.zeros(shape.numel())


class Odd:
    def __init__(self, *, step: int):
        self.step = step

    def __call__(self, query, key):
        return (query - key) % self.step == 0
'''
OWN = {
    "norm": "my_parts:Norm",
    "hidden_act": "my_parts:Act",
    "position": "my_parts:Complex",
    "attention_implementation": "my_parts:Attention",
    "initialization": "my_parts:Normal",
}


def decoder(dtype=torch.float64, **changes):
    model = build_model(ModelSection(**SHAPE | {"initializer_range": 0.2, "initialization": "normal"} | changes))
    initialize(model.to(dtype), seed=4)
    return model


def tokens(batch=2, seq=24):
    return torch.randint(0, 61, (batch, seq), generator=torch.Generator().manual_seed(1))


def packed():
    """Two rows of documents of 9, 1 and 14, and of 17 and 7 tokens."""
    segments = torch.tensor([[0] * 9 + [1] + [2] * 14, [0] * 17 + [1] * 7])
    positions = torch.tensor([[*range(9), 0, *range(14)], [*range(17), *range(7)]])
    return segments, positions


def the_same(one, other, within=1e-9):
    """Equal logits and, parameter by parameter in order, equal gradients."""
    outs = [model(tokens()) for model in (one, other)]
    assert (outs[0] - outs[1]).abs().max() < within
    grad = torch.randn_like(outs[0])
    found = [torch.autograd.grad(out, list(m.parameters()), grad) for out, m in zip(outs, (one, other), strict=True)]
    shapes = [sorted((g.abs().sum().item(), g.numel()) for g in grads if g.numel() > 1) for grads in found]
    for (ours, size), (theirs, other_size) in zip(*shapes, strict=True):
        assert size == other_size
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)
