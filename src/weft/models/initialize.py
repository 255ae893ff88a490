"""Initial weights: the value of each parameter depends on the seed and the parameter's name only.

The value does not depend on the order of construction, the device or the sharding: each rank draws the full parameter
and keeps its own shard. The schemes of `model.initialization` are:

| | embeddings | matrices | output projections (o_proj, down_proj) | head |
| --- | --- | --- | --- | --- |
| normal | N(0, r) | N(0, r) | N(0, r) | N(0, r) |
| scaled | N(0, r) | N(0, r) | N(0, r / sqrt(2 x layers)) | N(0, r) |
| muon_zero | N(0, r) | uniform, variance 1 / fan_in | 0 | 0 |

N(0, r) is a normal distribution with standard deviation r = `initializer_range`. `module:Class` is a custom scheme.
Norm weights are 1 (rmsnorm1p: 0), biases 0; a tied head is the embedding. Custom components keep the values that their
classes set. With `scaled`, GPT-2's scheme (Radford et al., 2019), the residual stream's variance does not grow with
depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.config.components import load_class
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.layers.custom import custom_component_value, derive_seed
from weft.models.roles import parameter_roles

OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


class _KeepMeta(TorchFunctionMode):
    """Skips the functions of `torch.nn.init`. On the meta device, their random numbers import PyTorch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """Context in which modules are built on the meta device, without computing initial values."""
    with torch.device("meta"), _KeepMeta():
        yield


def initial_value(model: nn.Module, name: str, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the full (unsharded) initial value of a parameter of the built-in decoder, on the CPU.

    Args:
        model: the decoder, which determines shapes and the scheme. It can be on the meta device or sharded.
        name: name of the parameter in `model.named_parameters()`.
        seed: seed of the initial weights.
        dtype: dtype of the result. Values are drawn in float32 and cast.

    Raises:
        UserError: a custom scheme returned a value that is not a tensor of the parameter's shape.
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"{type(model).__name__} initializes itself; initialization schemes apply only to the built-in decoder"
        )
    custom = custom_component_value(model, name, seed)
    if custom is not None:
        return custom.to(dtype)
    config, shape, role = model.config, model.get_parameter(name).shape, parameter_roles(model)[name]
    if role in ("norm", "bias"):
        module = model.get_submodule(name.rpartition(".")[0])
        constant: Any = module.initial_weight if role == "norm" and name.endswith("weight") else 0.0
        return torch.full(shape, constant, dtype=dtype, device="cpu")
    generator = torch.Generator(device="cpu")
    generator.manual_seed(derive_seed(seed, name))
    chosen = config.initialization
    scheme = SCHEMES[chosen] if chosen in SCHEMES else load_class(chosen, "initialization")()
    value = scheme(name, shape, role, generator, config)
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        given = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UserError(
            f"model.initialization: {chosen} returned {given} for {name}; it must return a tensor of {tuple(shape)}"
        )
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
    """Fills all parameters and buffers of an unsharded decoder with their initial values."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(model, name, seed, dtype=parameter.dtype))
    initialize_buffers(model, seed)


@torch.no_grad()
def initialize_buffers(model: nn.Module, seed: int = 0) -> None:
    """Fills a decoder's buffers, which `to_empty` leaves uninitialized.

    Buffers of custom components get the values that the component sets; other buffers get 0.
    """
    for name, buffer in model.named_buffers():
        custom = custom_component_value(model, name, seed)
        buffer.zero_() if custom is None else buffer.copy_(custom)
