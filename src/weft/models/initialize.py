"""Initial weights: the value of each parameter depends on the seed and the parameter's name only.

The value does not depend on the order of construction, the sharding or the device: each rank draws its own shard, with
random numbers that are computed from their index (`counter_random`). The schemes of `model.initialization` are:

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.config.components import load_class
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.counter_random import fill_normal, fill_uniform
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


class Part(NamedTuple):
    """A rectangular part of a tensor, such as a rank's shard."""

    start: Sequence[int]
    """Index of the first element in the whole tensor, one number for each dimension."""
    size: Sequence[int]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + count) for first, count in zip(self.start, self.size, strict=True))


@torch.no_grad()
def initial_value(
    model: nn.Module,
    name: str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    part: Part | None = None,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
    roles: Mapping[str, str] | None = None,
) -> torch.Tensor:
    """Returns the initial value of a parameter of the built-in decoder, or a part of it.

    Args:
        model: the decoder, which determines shapes and the scheme. It can be on the meta device or sharded.
        name: name of the parameter in `model.named_parameters()`.
        seed: seed of the initial weights.
        dtype: dtype of the result. Values are drawn in float32 and cast.
        part: the part of the parameter to return. Default: the full (unsharded) parameter. Only this part is drawn,
            except for custom components and custom schemes, which return full values.
        device: device of the result, on which it is drawn. Custom components and custom schemes draw on the CPU.
        out: tensor of the part's size to fill and return, whose dtype and device are used in place of the others.
        roles: `parameter_roles(model)`, which takes long in a large model. Default: it is computed.

    Raises:
        UserError: a custom scheme returned a value that is not a tensor of the parameter's shape.
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"{type(model).__name__} initializes itself; initialization schemes apply only to the built-in decoder"
        )
    config, shape, role = model.config, model.get_parameter(name).shape, (roles or parameter_roles(model))[name]
    part = part or Part([0] * len(shape), shape)
    value = torch.empty(tuple(part.size), dtype=dtype, device=device) if out is None else out
    custom = custom_component_value(model, name, seed)
    if custom is not None:
        return value.copy_(custom[part.slices])
    if role in ("norm", "bias"):
        module = model.get_submodule(name.rpartition(".")[0])
        constant: Any = module.initial_weight if role == "norm" and name.endswith("weight") else 0.0
        return value.fill_(constant)
    tensor_seed = derive_seed(seed, name)
    if config.initialization in SCHEMES:
        fill, scale = SCHEMES[config.initialization](name, shape, role, config)
        fill(value, scale, tensor_seed, part.start, shape)
        return value
    return value.copy_(_custom_scheme_value(config, name, shape, role, tensor_seed)[part.slices])


def _custom_scheme_value(config: ModelSection, name: str, shape: torch.Size, role: str, seed: int) -> torch.Tensor:
    """Returns the full value that the class of `model.initialization` draws."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(seed)
    value = load_class(config.initialization, "initialization")()(name, shape, role, generator, config)
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        given = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UserError(
            f"model.initialization: {config.initialization} returned {given} for {name}; it must return a tensor of "
            f"{tuple(shape)}"
        )
    return value


# Schemes: each returns a function of `counter_random`, and the scale of its distribution.


def _normal(name: str, shape: torch.Size, role: str, config: ModelSection) -> tuple[Any, float]:
    return fill_normal, config.initializer_range


def _scaled(name: str, shape: torch.Size, role: str, config: ModelSection) -> tuple[Any, float]:
    divisor = math.sqrt(2 * config.num_hidden_layers) if name.endswith(OUTPUTS) else 1.0
    return fill_normal, config.initializer_range / divisor


def _muon_zero(name: str, shape: torch.Size, role: str, config: ModelSection) -> tuple[Any, float]:
    if role == "embedding":
        return fill_normal, config.initializer_range
    if role == "head" or name.endswith(OUTPUTS):
        return fill_uniform, 0.0
    return fill_uniform, math.sqrt(3.0 / shape[-1])  # a uniform variable on (-a, a) has variance a^2 / 3


SCHEMES = {"normal": _normal, "scaled": _scaled, "muon_zero": _muon_zero}


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fills all parameters and buffers of an unsharded decoder with their initial values."""
    roles = parameter_roles(model)
    for name, parameter in model.named_parameters():
        initial_value(model, name, seed, out=parameter, roles=roles)
    initialize_buffers(model, seed)


@torch.no_grad()
def initialize_buffers(model: nn.Module, seed: int = 0) -> None:
    """Fills a decoder's buffers, which `to_empty` leaves uninitialized.

    Buffers of custom components get the values that the component sets; other buffers get 0.
    """
    for name, buffer in model.named_buffers():
        custom = custom_component_value(model, name, seed)
        buffer.zero_() if custom is None else buffer.copy_(custom)
