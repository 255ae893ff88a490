"""A small Llama on the meta device, as a person writes it, for plans of `weft.parallelize`."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight)


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(hidden), RMSNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads), MLP(hidden, inner)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    def __init__(self, vocab=32000, hidden=4096, heads=32, inner=11008, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, inner) for _ in range(layers))
        self.norm, self.head = RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float().logsumexp(-1).mean()


def make():
    with torch.device("meta"):
        return Llama().bfloat16()


example = torch.empty(2, 4096, dtype=torch.long, device="meta")


class PerToken(nn.Module):
    """Layers that treat each position alone: long sequences can be split without communication."""

    def __init__(self, hidden=512, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(MLP(hidden, 2 * hidden) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def needs_arguments(width):
    return nn.Linear(width, width)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        if x.sum() > 0:
            return self.layer(x)
        return x


def branch_example():
    return (torch.zeros(2, 16),)


wrong_example = (torch.zeros(2, 5),)
no_example = ()
