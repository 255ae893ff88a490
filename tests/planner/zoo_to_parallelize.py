"""Modules of many architectures, written as people write them for one device: the zoo of `weft.parallelize`."""

import torch
import torch.nn.functional as F
from modules_to_parallelize import CLIP, GPT, ViT
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft


class RMSNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x, cos, sin):
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class LlamaBlock(nn.Module):
    """Grouped queries and rotary embeddings."""

    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.norm_1, self.norm_2 = RMSNorm(hidden), RMSNorm(hidden)
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(hidden, 2 * hidden, bias=False), nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        y = self.norm_1(x)
        q = self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = (f(y).view(batch, length, self.kv_heads, self.size).transpose(1, 2) for f in (self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ChunkedLlama(nn.Module):
    """A Llama that never has all logits: the head and the cross-entropy run, and run again, on chunks of a sequence."""

    def __init__(self, hidden=16, vocab=64, layers=2, heads=4, kv_heads=2, chunk=8):
        super().__init__()
        self.embedding, self.chunk = nn.Embedding(vocab, hidden), chunk
        self.layers = nn.ModuleList(LlamaBlock(hidden, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        inverse = 10000.0 ** -(torch.arange(0, hidden // heads, 2) / (hidden // heads))
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, tokens, labels):
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device).to(self.inverse), self.inverse)
        x, cos, sin = self.embedding(tokens), angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        total = 0.0
        for some, wanted in zip(self.norm(x).split(self.chunk, 1), labels.split(self.chunk, 1), strict=True):
            total = total + checkpoint(self.loss, some, wanted, use_reentrant=False)
        return total / labels.numel()

    def loss(self, x, labels):
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


class FewHeads(ChunkedLlama):
    """Its attention splits into two parts only, and its MLP into many."""

    def __init__(self):
        super().__init__(heads=2, kv_heads=2, chunk=64)


class Mixtral(nn.Module):
    """Experts as Transformers wrote them at first: a loop over experts, and an index of their tokens."""

    def __init__(self, hidden=16, experts=4, layers=2):
        super().__init__()
        from modules_to_parallelize import Experts

        self.embedding = nn.Embedding(48, hidden)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.ModuleDict({"block": LlamaBlock(hidden, 4, 2), "norm": RMSNorm(hidden)})
            layer["moe"] = Experts(hidden, experts)
            self.layers.append(layer)
        self.head = nn.Linear(hidden, 48, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        angles = torch.arange(tokens.shape[1], device=x.device).to(x)[:, None] * 0.1 * torch.ones(1, 2).to(x)
        for layer in self.layers:
            x = layer["block"](x, angles.cos(), angles.sin())
            x = x + layer["moe"](layer["norm"](x))
        return self.head(x)


class T5Attention(nn.Module):
    def __init__(self, hidden, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x, memory, bias):
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class T5Layer(nn.Module):
    def __init__(self, hidden, crossed):
        super().__init__()
        self.own, self.norms = T5Attention(hidden), nn.ModuleList(RMSNorm(hidden) for _ in range(3))
        self.cross = T5Attention(hidden) if crossed else None
        self.wi, self.wo = nn.Linear(hidden, 2 * hidden, bias=False), nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x, bias, memory=None):
        y = self.norms[0](x)
        x = x + self.own(y, y, bias)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory, 0.0)
        return x + self.wo(F.relu(self.wi(self.norms[2](x))))


class T5(nn.Module):
    """An encoder and a decoder with shared embeddings and relative position biases."""

    def __init__(self, hidden=16, vocab=48, layers=2, heads=4):
        super().__init__()
        self.shared = nn.Embedding(vocab, hidden)
        self.encoder_bias, self.decoder_bias = nn.Embedding(9, heads), nn.Embedding(9, heads)
        self.encoder = nn.ModuleList(T5Layer(hidden, False) for _ in range(layers))
        self.decoder = nn.ModuleList(T5Layer(hidden, True) for _ in range(layers))

    def bias(self, table, length, device):
        place = torch.arange(length, device=device)
        return table((place[None] - place[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)[None]

    def forward(self, source, target):
        memory = self.shared(source)
        bias = self.bias(self.encoder_bias, source.shape[1], source.device)
        for layer in self.encoder:
            memory = layer(memory, bias)
        x, length = self.shared(target), target.shape[1]
        causal = torch.full((length, length), -1e9, device=x.device).to(x).triu(1)
        bias = self.bias(self.decoder_bias, length, target.device) + causal
        for layer in self.decoder:
            x = layer(x, bias, memory)
        logits = x[:, :-1] @ self.shared.weight.T
        return {"loss": F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()), "logits": logits}


class SwinBlock(nn.Module):
    """Attention within windows of an image, which every second block shifts."""

    def __init__(self, hidden, window, shift):
        super().__init__()
        self.window, self.shift, self.heads = window, shift, 2
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.bias = nn.Parameter(torch.randn(2, window * window, window * window))
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x):
        batch, height, width, hidden = x.shape
        w, y = self.window, self.norm_1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = y.view(batch, height // w, w, width // w, w, hidden).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, hidden)
        q, k, v = self.qkv(y).view(-1, w * w, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / 2 + self.bias
        if self.shift:
            scores = scores.view(batch, -1, self.heads, w * w, w * w) + self.mask(height, width, x)[:, None]
            scores = scores.view(-1, self.heads, w * w, w * w)
        y = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, w * w, hidden))
        y = y.view(batch, height // w, width // w, w, w, hidden).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(batch, height, width, hidden)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm_2(x))

    def mask(self, height, width, like):
        """Hides tokens of other parts of the image, which the shift brought into a window."""
        w = self.window
        parts = [torch.arange(size, device=like.device) for size in (height, width)]
        rows, columns = ((p >= p.shape[0] - w).long() + (p >= p.shape[0] - self.shift).long() for p in parts)
        region = (
            (rows[:, None] * 3 + columns).view(height // w, w, width // w, w).permute(0, 2, 1, 3).reshape(-1, w * w)
        )
        return torch.where(region[:, None] == region[:, :, None], 0.0, -100.0).to(like)


class Swin(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 2, 2)
        self.first = nn.Sequential(SwinBlock(hidden, 4, 0), SwinBlock(hidden, 4, 2))
        self.reduce = nn.Linear(4 * hidden, 2 * hidden, bias=False)
        self.second = nn.Sequential(SwinBlock(2 * hidden, 4, 0))
        self.head = nn.Linear(2 * hidden, 5)

    def forward(self, images):
        x = self.first(self.patches(images).permute(0, 2, 3, 1))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.head(self.second(self.reduce(x)).mean((1, 2)))


class Level(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.one, self.two = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.norm = nn.GroupNorm(4, outer)

    def forward(self, x):
        return F.silu(self.two(F.silu(self.norm(self.one(x)))))


class DeepUNet(nn.Module):
    """Convolutions with skip connections over three resolutions, and a time embedding."""

    def __init__(self, hidden=8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.start, self.down = nn.Conv2d(3, hidden, 3, padding=1), nn.ModuleList()
        self.down += [Level(hidden, hidden), Level(hidden, 2 * hidden)]
        self.middle = Level(2 * hidden, 2 * hidden)
        self.ups = nn.ModuleList(
            [nn.ConvTranspose2d(2 * hidden, 2 * hidden, 2, 2), nn.ConvTranspose2d(hidden, hidden, 2, 2)]
        )
        self.up = nn.ModuleList([Level(4 * hidden, hidden), Level(2 * hidden, hidden)])
        self.end = nn.Conv2d(hidden, 3, 1)

    def forward(self, images, times):
        x = self.start(images) + self.time(times)[:, :, None, None]
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for widen, level in zip(self.ups, self.up, strict=True):
            x = level(torch.cat([widen(x), kept.pop()], 1))
        return self.end(x)


class RWKVBlock(nn.Module):
    """A recurrence over the sequence, one token after another, and a shift by one token."""

    def __init__(self, hidden):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.key, self.value, self.receptance, self.output = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.decay, self.first, self.mix = (nn.Parameter(torch.rand(hidden)) for _ in range(3))
        self.ffn_key, self.ffn_value = (
            nn.Linear(hidden, 2 * hidden, bias=False),
            nn.Linear(2 * hidden, hidden, bias=False),
        )

    def forward(self, x):
        y = self.norm_1(x)
        y = y * self.mix + F.pad(y, (0, 0, 1, -1)) * (1 - self.mix)
        k, v, r = self.key(y), self.value(y), self.receptance(y).sigmoid()
        top, bottom, out = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
        for step in range(x.shape[1]):
            now = torch.exp(k[:, step])
            out.append((top + torch.exp(self.first) * now * v[:, step]) / (bottom + torch.exp(self.first) * now))
            decay = torch.exp(-torch.exp(self.decay))
            top, bottom = decay * top + now * v[:, step], decay * bottom + now
        x = x + self.output(r * torch.stack(out, 1))
        return x + self.ffn_value(F.relu(self.ffn_key(self.norm_2(x))).square())


class RWKV(nn.Module):
    def __init__(self, hidden=16, vocab=32, layers=2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.layers = nn.ModuleList(RWKVBlock(hidden) for _ in range(layers))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Axial(nn.Module):
    """Attention along one of the two axes of a table, with a bias from pairs."""

    def __init__(self, hidden, pair=0):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden, bias=False)
        self.gate, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.bias = nn.Linear(pair, 2, bias=False) if pair else None

    def forward(self, x, pairs=None):
        y = self.norm(x)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(-2, -3) for t in self.qkv(y).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 2
        if self.bias is not None:
            scores = scores + self.bias(pairs).permute(0, 3, 1, 2).unsqueeze(1)
        y = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        return self.out(y * self.gate(self.norm(x)).sigmoid())


class Evoformer(nn.Module):
    """Row and column attention, an outer product mean, and a triangle update, as in AlphaFold 2."""

    def __init__(self, hidden=8, pair=8):
        super().__init__()
        self.rows, self.columns = Axial(hidden, pair), Axial(hidden)
        self.transition = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, hidden))
        self.left, self.right = nn.Linear(hidden, 4), nn.Linear(hidden, 4)
        self.outer, self.norm = nn.Linear(16, pair), nn.LayerNorm(pair)
        self.a, self.b, self.back = nn.Linear(pair, pair), nn.Linear(pair, pair), nn.Linear(pair, pair)

    def forward(self, msa, pairs):
        msa = msa + self.rows(msa, pairs)
        msa = msa + self.columns(msa.transpose(1, 2)).transpose(1, 2)
        msa = msa + self.transition(msa)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(msa), self.right(msa)) / msa.shape[1]
        pairs = pairs + self.outer(outer.flatten(-2))
        z = self.norm(pairs)
        pairs = pairs + self.back(torch.einsum("bikc,bjkc->bijc", self.a(z).sigmoid(), self.b(z)))
        return msa, pairs


@weft.register_op("b l d^, d^ d^, b l d^ -> b l d^")
def mixed(x, weight, gate):
    """An operation that DTensor cannot look into, because it goes through an autograd function."""
    return _Mixed.apply(x, weight, gate)


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate):
        ctx.save_for_backward(x, weight, gate)
        assert type(x) in (torch.Tensor, nn.Parameter) or x.is_meta or hasattr(x, "fake_mode")
        return torch.tanh(x @ weight) * gate

    @staticmethod
    def backward(ctx, grad):
        x, weight, gate = ctx.saved_tensors
        inner = torch.tanh(x @ weight)
        slope = grad * gate * (1 - inner.square())
        return slope @ weight.T, x.flatten(0, 1).T @ slope.flatten(0, 1), grad * inner


class WithCustom(nn.Module):
    """A mixer that is a registered operation."""

    def __init__(self, hidden=16, layers=2):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(CustomBlock(hidden))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class CustomBlock(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(hidden), nn.Linear(hidden, hidden)
        self.weight = nn.Parameter(torch.randn(hidden, hidden) / 4)

    def forward(self, x):
        y = self.norm(x)
        return x + mixed(y, self.weight, self.gate(y))


def _tokens(rows, length, vocab):
    return torch.randint(0, vocab, (rows, length))


# name -> (class, function of the number of rows that returns the positional arguments)
ZOO = {
    "gpt": (GPT, lambda rows: (_tokens(rows, 12, 48), _tokens(rows, 12, 48))),
    "llama": (ChunkedLlama, lambda rows: (_tokens(rows, 16, 64), _tokens(rows, 16, 64))),
    "few-heads": (FewHeads, lambda rows: (_tokens(rows, 128, 64), _tokens(rows, 128, 64))),
    "mixtral": (Mixtral, lambda rows: (_tokens(rows, 6, 48),)),
    "t5": (T5, lambda rows: (_tokens(rows, 8, 48), _tokens(rows, 9, 48))),
    "vit": (ViT, lambda rows: (torch.randn(rows, 3, 16, 16),)),
    "swin": (Swin, lambda rows: (torch.randn(rows, 3, 32, 32),)),
    "unet": (DeepUNet, lambda rows: (torch.randn(rows, 3, 8, 8), torch.randn(rows, 4))),
    "rwkv": (RWKV, lambda rows: (_tokens(rows, 8, 32),)),
    "evoformer": (Evoformer, lambda rows: (torch.randn(rows, 4, 8, 8), torch.randn(rows, 8, 8, 8))),
    "custom": (WithCustom, lambda rows: (torch.randn(rows, 8, 16),)),
    "clip": (CLIP, lambda rows: (torch.randn(rows, 3, 2, 2), _tokens(rows, 5, 20))),
}


def make(name: str) -> nn.Module:
    """A module in float64, with the same values on all ranks."""
    torch.manual_seed(0)
    return ZOO[name][0]().double()


def inputs_of(name: str, rows: int) -> tuple:
    """Positional arguments of a call."""
    torch.manual_seed(1)
    return tuple(one.double() if one.is_floating_point() else one for one in ZOO[name][1](rows))
