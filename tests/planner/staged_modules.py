"""Modules that return their loss, for plans with pipeline stages: written as people write them, for one device."""

import torch
import torch.nn.functional as F
from modules_to_parallelize import Block
from torch import nn


class TiedGPT(nn.Module):
    """A GPT with a tied embedding in the first and the last stage, a mask that all blocks take, and dropout."""

    def __init__(self, hidden=16, vocab=32, layers=4, dropout=0.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Parameter(torch.randn(64, hidden))
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe[torch.arange(ids.shape[1], device=ids.device)]
        seen = (ids != 0).to(x.dtype).unsqueeze(-1)  # every stage computes it
        for block in self.h:
            x = self.drop(block(x)) * seen
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


class Decoder(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(hidden, 4, 32, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)

    def forward(self, y, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        for layer in self.layers:
            y = layer(y, memory, tgt_mask=mask)
        return {"states": self.norm(y)}


class EncoderDecoder(nn.Module):
    """Like T5: the result of the encoder goes to all layers of the decoder. A stage begins within a module."""

    def __init__(self, hidden=16, vocab=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 4, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.decoder = Decoder(hidden, 3)

    def forward(self, source, target=None, *, scale=1.0):
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        out = self.decoder(self.embed(target) * scale, memory)
        return {"logits": out["states"] @ self.embed.weight.t(), "target": target}


def token_loss(out):
    """The loss of `EncoderDecoder`'s outputs."""
    return F.cross_entropy(out["logits"].flatten(0, 1), out["target"].flatten())


class SkipNet(nn.Module):
    """Like a U-Net: the result of each block of the way down goes to its partner on the way up, over several stages."""

    def __init__(self, channels=8):
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.SiLU())
            for _ in range(2)
        )
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * channels, channels, 3, padding=1) for _ in range(2))
        self.out = nn.Conv2d(channels, 3, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, images, wanted):
        x, skips = self.enter(images), []
        self.steps += 1
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.silu(block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)))
        return F.mse_loss(self.out(x), wanted)


class Sides(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, ids, x):
        y = self.linear(x)
        return ids % 3, y, y.detach(), 2 * x


class Mixed(nn.Module):
    """The first stage sends integers, a tensor without gradient, and one whose gradient nothing needs, to the last."""

    def __init__(self, hidden=16, vocab=32):
        super().__init__()
        self.embed, self.sides = nn.Embedding(vocab, hidden), Sides(hidden)
        self.h = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(4))
        self.out = nn.Linear(hidden, vocab)

    def forward(self, ids, targets):
        x = self.embed(ids)
        kinds, graded, constant, ignored = self.sides(ids, x)
        for layer in self.h:
            x = x + layer(x).tanh() * (kinds == 1).unsqueeze(-1) + constant
        return F.cross_entropy(self.out(x + graded + ignored.detach()).flatten(0, 1), targets.flatten())


def inputs_of(name, rows=8):
    """Positional and keyword arguments of a call."""
    torch.manual_seed(1)
    ids = torch.randint(0, 32, (rows, 6))
    return {
        "gpt": lambda: ((ids, ids.roll(-1, 1)), {}),
        "dropout": lambda: ((ids, ids.roll(-1, 1)), {}),
        "mixed": lambda: ((ids, ids.roll(-1, 1)), {}),
        "encoder-decoder": lambda: ((ids,), {"target": ids.roll(1, 1), "scale": 0.5}),
        "unet": lambda: ((torch.randn(rows, 3, 8, 8), torch.randn(rows, 3, 8, 8)), {}),
    }[name]()


def make(name):
    """A module in float64, with the same values on all ranks."""
    torch.manual_seed(0)
    made = {
        "gpt": TiedGPT,
        "dropout": lambda: TiedGPT(dropout=0.2),
        "encoder-decoder": EncoderDecoder,
        "unet": SkipNet,
        "mixed": Mixed,
    }
    return made[name]().double()


def dropout():
    """A GPT with dropout, whose processes import it by name."""
    return TiedGPT(layers=2, dropout=0.2)


def wide():
    """A GPT whose layers are worth splitting."""
    return TiedGPT(hidden=512, vocab=64, layers=8)


class Centered(nn.Module):
    """A loss that is no mean over rows: it subtracts the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.b(self.a(x).tanh())
        return (y - y.mean(0)).square().mean()
