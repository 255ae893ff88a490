"""Initial weights, each a function of the seed and of its own name alone.

So they do not depend on the order of construction, on the device, or on how a model is sharded: a rank draws the whole
parameter and keeps its part. The schemes (`model.initialization`):

| | embeddings | matrices | output projections (o_proj, down_proj) | head |
| --- | --- | --- | --- | --- |
| normal | N(0, r) | N(0, r) | N(0, r) | N(0, r) |
| scaled | N(0, r) | N(0, r) | N(0, r / sqrt(2 x layers)) | N(0, r) |
| muon_zero | N(0, r) | uniform, variance 1 / fan_in | 0 | 0 |

with standard deviation r = `initializer_range`; `module:Class` is one of the user's own. Norm weights are one
(rmsnorm1p's zero), biases zero; a tied head is the embedding. Norms and other parts of the user's own have the values
that their classes give them.
`scaled` is GPT-2's (Radford et al., 2019): the residual stream's variance does not grow with depth.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from weft.config.components import load_class
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.layers.custom import custom_component_value, derive_seed
from weft.models.roles import parameter_roles

OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


def initial_value(model: nn.Module, name: str, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The whole initial value of one parameter of a built-in decoder, on the CPU.

    Args:
        model: gives the shapes and the scheme; may be on the meta device, sharded, or filled already.
        name: of the parameter, as in `model.named_parameters()`.
        dtype: of the result. Values are drawn in float32: other dtypes start from the same numbers.
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"{type(model).__name__} initializes itself: the schemes are the built-in decoder's")
    own = custom_component_value(model, name, seed)
    if own is not None:
        return own.to(dtype)
    config, shape, role = model.config, model.get_parameter(name).shape, parameter_roles(model)[name]
    if role in ("norm", "bias"):
        holder = model.get_submodule(name.rpartition(".")[0])
        first: Any = holder.initial_weight if role == "norm" and name.endswith("weight") else 0.0
        return torch.full(shape, first, dtype=dtype, device="cpu")
    generator = torch.Generator(device="cpu")
    generator.manual_seed(derive_seed(seed, name))
    chosen = config.initialization
    scheme = SCHEMES[chosen] if chosen in SCHEMES else load_class(chosen, "initialization")()
    value = scheme(name, shape, role, generator, config)
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        given = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UserError(f"model.initialization: {chosen} gave {given} for {name}, which is {tuple(shape)}")
    return value.to(dtype)


def _normal(
    name: str, shape: torch.Size, role: str, generator: torch.Generator, config: ModelSection, divisor: float = 1.0
) -> torch.Tensor:
    return torch.empty(shape, device="cpu").normal_(0.0, config.initializer_range / divisor, generator=generator)


def _scaled(name: str, shape: torch.Size, role: str, generator: torch.Generator, config: ModelSection) -> torch.Tensor:
    divisor = math.sqrt(2 * config.num_hidden_layers) if name.endswith(OUTPUTS) else 1.0
    return _normal(name, shape, role, generator, config, divisor)


def _muon_zero(
    name: str, shape: torch.Size, role: str, generator: torch.Generator, config: ModelSection
) -> torch.Tensor:
    if role == "embedding":
        return _normal(name, shape, role, generator, config)
    if role == "head" or name.endswith(OUTPUTS):
        return torch.zeros(shape, device="cpu")
    bound = math.sqrt(3.0 / shape[-1])  # a uniform variable on (-a, a) has variance a^2 / 3
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


SCHEMES = {"normal": _normal, "scaled": _scaled, "muon_zero": _muon_zero}


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill all parameters of a decoder that lies whole on one device."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(model, name, seed, dtype=parameter.dtype))
    initialize_buffers(model, seed)


@torch.no_grad()
def initialize_buffers(model: nn.Module, seed: int = 0) -> None:
    """Give a decoder's buffers their first values, which `to_empty` leaves out.

    Counts and biases of routers are all 0; parts of the user's own have what their classes give them.
    """
    for name, buffer in model.named_buffers():
        own = custom_component_value(model, name, seed)
        buffer.zero_() if own is None else buffer.copy_(own)
