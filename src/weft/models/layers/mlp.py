"""The feed-forward layer (MLP) of a block, and its activation functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.model import ModelSection
from weft.models.layers.custom import custom_component
from weft.models.layers.dropout import Dropout


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Returns relu(x)^2 (So et al., 2021)."""
    return F.relu(x).square()


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}


def make_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the activation function for a value of `model.hidden_act`: a built-in name or `module:Class`."""
    return ACTIVATIONS[name] if name in ACTIVATIONS else custom_component(name, "activation")


class MLP(nn.Module):
    """The MLP of a block: down(act(up(x))), or gated (Shazeer, 2020): down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelSection):
        super().__init__()
        width, inner, bias = config.hidden_size, intermediate_size(config), config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.mlp == "gated" else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = make_activation(config.hidden_act)
        self.hidden_dropout = Dropout(config.hidden_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[batch, seq, hidden]` to `[batch, seq, hidden]`."""
        if self.gate_proj is None:
            inner = self.activation(self.up_proj(x))
        else:
            inner = self.activation(self.gate_proj(x)) * self.up_proj(x)
        return self.hidden_dropout(self.down_proj(inner))


def intermediate_size(config: ModelSection) -> int:
    """Returns the hidden size of the MLP: the value of `intermediate_size` or, if this key is not set, its default.

    The default is 4 x hidden size; for a gated MLP, 8/3 x hidden size, rounded up to a multiple of 8.
    """
    if config.intermediate_size is not None:
        return config.intermediate_size
    if config.mlp == "plain":
        return 4 * config.hidden_size
    return -(-8 * config.hidden_size // 24) * 8
