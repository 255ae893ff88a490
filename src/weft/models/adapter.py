"""Adds low-rank adapters to a model, and initializes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.config.adapter import ROUTERS, STACKED, AdapterSection, adapted_layers, layer_of
from weft.models.layers.custom import derive_seed
from weft.models.layers.lora import Lora, lora_linear
from weft.models.layers.moe import Experts

Wrap = Callable[[nn.Module, str, Callable[[Callable], Callable]], None]


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the linear layers and stacked experts in a model's blocks: name -> `nn.Linear` or `Experts`.

    Blocks are members of an `nn.ModuleList`. Stacked experts have one entry for each of their weights. Routers are left
    out.
    """
    blocks = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not path.startswith(blocks):
            continue
        if type(module) is nn.Linear and path.rpartition(".")[2] not in ROUTERS:
            found[path] = module
        elif isinstance(module, Experts):
            found |= {f"{path}.{name}": module for name in STACKED}
    return found


def _replace_forward(module: nn.Module, label: str, wrapper: Callable[[Callable], Callable]) -> None:
    module.forward = wrapper(module.forward)


def add_adapter(
    model: nn.Module,
    section: AdapterSection,
    *,
    names: list[str] | None = None,
    wrap: Wrap = _replace_forward,
) -> None:
    """Adds the parameters of an adapter to the layers that `section` selects, and freezes all other parameters.

    The new parameters are uninitialized, in the dtype and on the device of the layer's weight.

    Args:
        model: an unsharded model with plain parameters, or a pipeline stage.
        names: the names of the layers; default: the layers that `section.targets` selects in this model.
        wrap: `wrap(module, label, wrapper)` replaces a module's forward by `wrapper(forward)`.

    Raises:
        UserError: a target matches no layer, or the adapter does not support a selected layer.
    """
    layers = linear_layers(model)
    stacked = [name for name, module in layers.items() if isinstance(module, Experts)]
    names = adapted_layers(section, layers, stacked) if names is None else names
    model.requires_grad_(False)
    for name in names:
        module: Any = layers.get(name)
        if module is None:
            continue  # a layer of another pipeline stage
        if "lora" not in module._modules:
            module.lora = Lora(section.scale, section.dropout)
        if isinstance(module, Experts):
            leaf = name.rpartition(".")[2]
            weight = getattr(module, leaf)
            _add(module, f"{leaf}_lora_a", weight, (weight.shape[0], section.r, weight.shape[2]))
            _add(module, f"{leaf}_lora_b", weight, (weight.shape[0], weight.shape[1], section.r))
            continue
        weight = module.weight
        _add(module, "lora_a", weight, (section.r, weight.shape[1]))
        _add(module, "lora_b", weight, (weight.shape[0], section.r))
        if section.dora:
            _add(module, "lora_magnitude", weight, (weight.shape[0],))
        if section.init == "pissa":
            _add(module, "lora_a0", weight, (section.r, weight.shape[1])).requires_grad_(False)
            _add(module, "lora_b0", weight, (weight.shape[0], section.r)).requires_grad_(False)
        wrap(module, f"adapter: {'DoRA' if section.dora else 'LoRA'} of rank {section.r}", partial(_adapted, module))


def _add(module: nn.Module, name: str, like: torch.Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
    module.register_parameter(name, parameter)
    return parameter


def _adapted(linear: nn.Linear, forward: Callable) -> Callable:
    """Returns a function that replaces the `forward` of a linear layer, and applies the layer's adapter too."""
    return partial(lora_linear, linear)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return layer_of(name) is not None


def initial_adapter_value(
    name: str, shape: torch.Size, section: AdapterSection, seed: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Returns the full (unsharded) initial value of an adapter's parameter, on the CPU.

    The value depends only on the seed, the parameter's name and its shape. Values are drawn in float32 and cast.

    Returns:
        The value; None if the value depends on the base model's weights (DoRA's magnitudes, and PiSSA).
    """
    found = layer_of(name)
    assert found is not None
    kind = found[1]
    if kind == "lora_magnitude" or section.init == "pissa":
        return None
    if kind == "lora_b":
        return torch.zeros(shape, dtype=dtype)
    generator = torch.Generator(device="cpu")
    generator.manual_seed(derive_seed(seed, name))
    value = torch.empty(shape, device="cpu")
    if section.init == "gaussian":
        value.normal_(0.0, 1 / section.r, generator=generator)
    else:
        bound = 1 / math.sqrt(shape[-1])  # `kaiming_uniform_` with a = sqrt(5), as in nn.Linear
        value.uniform_(-bound, bound, generator=generator)
    return value.to(dtype)
