"""Initial weights, each a function of the seed and of its own name alone.

So they do not depend on the order of construction, on the device, or on how a model is sharded: a rank draws the whole
parameter and keeps its part. The schemes (`model.initialization`):

| | embeddings | matrices | output projections (o_proj, down_proj) | head |
| --- | --- | --- | --- | --- |
| normal | N(0, r) | N(0, r) | N(0, r) | N(0, r) |
| scaled | N(0, r) | N(0, r) | N(0, r / sqrt(2 x layers)) | N(0, r) |
| muon_zero | N(0, r) | uniform, variance 1 / fan_in | 0 | 0 |

with standard deviation r = `initializer_range`. Norm weights are one (rmsnorm1p's zero), biases zero; a tied
head is the embedding.
`scaled` is GPT-2's (Radford et al., 2019): the residual stream's variance does not grow with depth.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from weft.models.decoder import Decoder
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
    config = model.config
    shape = model.get_parameter(name).shape
    role = parameter_roles(model)[name]
    value = torch.zeros(shape, dtype=torch.float32, device="cpu")
    if role == "norm" and name.endswith("weight"):
        return value.fill_(model.get_submodule(name.rpartition(".")[0]).initial_weight).to(dtype)
    if role in ("norm", "bias"):
        return value.to(dtype)

    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little"))
    std = config.initializer_range
    output = name.endswith(OUTPUTS)
    if config.initialization == "muon_zero" and role != "embedding":
        if not output and role != "head":
            bound = math.sqrt(3.0 / shape[-1])  # a uniform variable on (-a, a) has variance a^2 / 3
            value.uniform_(-bound, bound, generator=generator)
    else:
        if config.initialization == "scaled" and output:
            std /= math.sqrt(2 * config.num_hidden_layers)
        value.normal_(0.0, std, generator=generator)
    return value.to(dtype)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill all parameters of a decoder that lies whole on one device."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(model, name, seed, dtype=parameter.dtype))
    initialize_buffers(model)


@torch.no_grad()
def initialize_buffers(model: nn.Module) -> None:
    """Give a decoder's buffers their first values, which `to_empty` leaves out: counts and biases of routers, all 0."""
    for buffer in model.buffers():
        buffer.zero_()
