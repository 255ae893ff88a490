"""Modules for one device, written as people write them, with inputs: what `weft.parallelize` must run on several."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, hidden=16, heads=4):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x):
        batch, length, hidden = x.size()
        q, k, v = self.c_attn(x).split(hidden, dim=2)
        q, k, v = (t.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, hidden))


class Block(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = Attention(hidden)
        self.fc, self.proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    """Like nanoGPT: a fused projection of queries, keys and values, a mask in a buffer, and a tied head."""

    def __init__(self, hidden=16, vocab=48, layers=2, checkpointed=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(64, hidden)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.checkpointed = checkpointed

    def forward(self, ids, targets=None):
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return {"logits": logits, "hidden": [x]}
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class ViT(nn.Module):
    """17 tokens of each image, which no number of ranks divides, in PyTorch's own encoder layer."""

    def __init__(self, hidden=32):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 4, 4)
        self.cls, self.positions = nn.Parameter(torch.randn(1, 1, hidden)), nn.Parameter(torch.randn(1, 17, hidden))
        self.encoder = nn.TransformerEncoderLayer(hidden, 4, 64, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(hidden, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class UNet(nn.Module):
    """Convolutions, transposed ones, group norm and batch norm."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down, self.batch_norm = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 1)

    def forward(self, images):
        a = F.silu(self.norm(self.a(images)))
        deep = F.relu(self.batch_norm(self.down(a)))
        deep = deep + F.interpolate(F.max_pool2d(deep, 2), scale_factor=2.0, mode="nearest")
        return self.out(torch.cat([self.up(deep), a], 1))


@dataclass
class Pair:
    scores: torch.Tensor
    loss: torch.Tensor


class CLIP(nn.Module):
    """A loss over all pairs of the batch, which each data rank for itself would compute wrong."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.Embedding(20, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        a = F.normalize(self.image(image.flatten(1)), dim=-1)
        b = F.normalize(self.text(text).mean(1), dim=-1)
        scores = self.scale.exp() * a @ b.t()
        labels = torch.arange(scores.shape[0])
        return Pair(scores, (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2)


class Experts(nn.Module):
    """A mixture of experts, written naively: the number of tokens of an expert depends on the data."""

    def __init__(self, hidden=16, experts=4):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 32), nn.SiLU(), nn.Linear(32, hidden)) for _ in range(experts)
        )

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weight, chosen = torch.topk(F.softmax(self.gate(tokens), -1), 2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            out.index_add_(0, row, expert(tokens[row]) * weight[row, slot, None])
        return out.view_as(x)


class Loops(nn.Module):
    """Writes into a new tensor, a recurrent layer, control flow on values, and shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.linear, self.lstm = nn.Linear(6, 6), nn.LSTM(6, 6, batch_first=True)

    def forward(self, x):
        out = torch.zeros(x.shape[0], x.shape[1], 6)
        for step in range(x.shape[1]):
            out[:, step] = torch.tanh(self.linear(x[:, step]))
        y, _ = self.lstm(x)
        if x.mean() > 100:
            y = y * 0
        positive = x > 0
        rows = torch.where(positive.all(-1).any(-1))[0]
        return {"pair": (out + y, [x[positive] * 2]), "count": int(positive.sum()), "sum": out[rows].sum()}


def inputs_of(name: str, rows: int = 4) -> tuple[tuple, dict]:
    """Positional and keyword arguments of a call."""
    torch.manual_seed(1)
    ids = torch.randint(0, 48, (rows, 12))
    return {
        "gpt": lambda: ((ids,), {"targets": ids.roll(-1, 1)}),
        "block": lambda: ((ids,), {"targets": ids.roll(-1, 1)}),
        "vit": lambda: ((torch.randn(rows, 3, 16, 16),), {}),
        "unet": lambda: ((torch.randn(rows, 3, 16, 16),), {}),
        "clip": lambda: ((torch.randn(rows, 3, 2, 2),), {"text": torch.randint(0, 20, (rows, 5))}),
        "experts": lambda: ((torch.randn(rows, 6, 16),), {}),
        "loops": lambda: ((torch.randn(rows, 3, 6),), {}),
    }[name]()


MODULES: dict[str, Any] = {
    "gpt": GPT,
    "block": lambda: GPT(layers=1),
    "vit": ViT,
    "unet": UNet,
    "clip": CLIP,
    "experts": Experts,
    "loops": Loops,
}


def make(name: str) -> nn.Module:
    """A module in float64, with the same values on all ranks."""
    torch.manual_seed(0)
    return MODULES[name]().double()
