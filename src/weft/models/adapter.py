"""Adds low-rank adapters to a model, and initializes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.config.adapter import (
    ROUTERS,
    STACKED,
    AdapterSection,
    adapted_layers,
    layer_of,
    trained_heads,
    unquantizable,
)
from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.layers.blockwise import FORMATS, PACKED, block_size
from weft.models.layers.custom import derive_seed
from weft.models.layers.lora import Lora, has_quantized_weight, lora_linear
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
    """Adds the parameters of an adapter to the layers that `section` selects, and freezes all other parameters, except
    for the head of a reward model.

    The new parameters are uninitialized, in the dtype and on the device of the layer's weight; the initial values that
    PiSSA keeps have at least float32, so that their product is the product that training subtracted. With
    `section.quantize`, the frozen weights of all linear layers and experts of the blocks are replaced by uninitialized
    quantized weights.

    Args:
        model: an unsharded model with plain parameters, or a pipeline stage.
        names: the names of the layers; default: the layers that `section.targets` selects in this model.
        wrap: `wrap(module, label, wrapper)` replaces a module's forward by `wrapper(forward)`.

    Raises:
        UserError: a target matches no layer, or the adapter does not support a selected layer.
    """
    layers: dict[str, Any] = linear_layers(model)
    stacked = [name for name, module in layers.items() if isinstance(module, Experts)]
    names = adapted_layers(section, layers, stacked) if names is None else names
    heads = trained_heads(model.config) if isinstance(model, Decoder) else ()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in heads)
    for name in (name for name in names if name in layers):  # a pipeline stage has only some of the layers
        _add_low_rank(layers[name], name.rpartition(".")[2], section)
    if section.quantize is not None:
        for name, module in layers.items():
            _quantize(module, name, section.quantize)
    kind = f"{'DoRA' if section.dora else 'LoRA'} of rank {section.r}"
    for module in (module for module in layers.values() if isinstance(module, nn.Linear)):
        label = [kind] * hasattr(module, "lora") + [str(section.quantize)] * has_quantized_weight(module)
        if label:
            wrap(module, f"adapter: {', '.join(label)}", partial(_adapted, module))


def _add_low_rank(module: Any, leaf: str, section: AdapterSection) -> None:
    """Adds the parameters of an adapter to a linear layer, or to the stacked weight `leaf` of experts."""
    if not hasattr(module, "lora"):
        module.lora = Lora(section.scale, section.dropout)
    if isinstance(module, Experts):
        weight = getattr(module, leaf)
        _add(module, f"{leaf}_lora_a", weight, (weight.shape[0], section.r, weight.shape[2]))
        _add(module, f"{leaf}_lora_b", weight, (weight.shape[0], weight.shape[1], section.r))
        return
    weight = module.weight
    _add(module, "lora_a", weight, (section.r, weight.shape[1]))
    _add(module, "lora_b", weight, (weight.shape[0], section.r))
    if section.dora:
        _add(module, "lora_magnitude", weight, (weight.shape[0],))
    if section.init == "pissa":
        for kind, shape in (("lora_a0", (section.r, weight.shape[1])), ("lora_b0", (weight.shape[0], section.r))):
            exact = _add(module, kind, weight, shape).requires_grad_(False)
            exact.data = exact.data.to(torch.promote_types(weight.dtype, torch.float32))


def _quantize(module: Any, name: str, how: str) -> None:
    """Replaces the weight of a linear layer, or a stacked weight of experts, by uninitialized codes and scales.

    Raises:
        UserError: the number of inputs is not a multiple of 16.
    """
    leaf = name.rpartition(".")[2] if isinstance(module, Experts) else "weight"
    weight = getattr(module, leaf)
    *rest, columns = weight.shape
    if (wrong := unquantizable(name, columns)) is not None:
        raise UserError(f"adapter.quantize: {wrong}")
    dtype = FORMATS[how]
    setattr(module, "code_dtype", dtype)  # noqa: B010
    codes = torch.empty(*rest, columns // PACKED[dtype], dtype=dtype, device=weight.device)
    setattr(module, leaf, nn.Parameter(codes, requires_grad=False))
    _add(module, f"{leaf}_scale", weight, (*rest, columns // block_size(columns))).requires_grad_(False)


def quantized_weights(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, str]]:
    """Returns the quantized weights of a model, sharded or not: name -> codes, scales, and the format."""
    tensors, formats = dict(model.named_parameters()), {dtype: how for how, dtype in FORMATS.items()}
    return {
        name: (tensor, tensors[f"{name}_scale"], formats[tensor.dtype])
        for name, tensor in tensors.items()
        if tensor.dtype in formats and f"{name}_scale" in tensors
    }


def _add(module: nn.Module, name: str, like: torch.Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
    module.register_parameter(name, parameter)
    return parameter


def _adapted(linear: nn.Linear, forward: Callable) -> Callable:
    """Returns a function that replaces the `forward` of a linear layer with an adapter or a quantized weight."""
    return partial(lora_linear, linear)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return layer_of(name) is not None


def saved_with_adapter(model: object) -> Callable[[str], bool]:
    """Returns a function that tells by its name whether a tensor of a model is in checkpoints of an adapter.

    These are the parameters of the adapter, and the head of a reward model.

    Args:
        model: the section `model`.
    """
    heads = trained_heads(model)
    return lambda name: is_adapter(name) or name in heads


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
