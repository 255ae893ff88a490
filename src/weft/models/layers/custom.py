"""Custom components of a decoder: user classes such as `model.norm: my_parts:MyNorm` (docs/parts.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weft.config.components import load_class
from weft.config.custom_components import CUSTOM_COMPONENT_KEYS
from weft.errors import UserError

# The call that created each custom module. The decoder is built on the meta device, so initial values come from a
# second instance that the call creates.
FACTORIES: WeakKeyDictionary[nn.Module, Callable[[], nn.Module]] = WeakKeyDictionary()


def custom_component(type_: str, kind: str, *arguments: Any) -> Any:
    """Instantiates the custom class of a component.

    Args:
        type_: the class, as `module:Class`.
        kind: kind of the component, such as "norm".
        arguments: arguments of the constructor.

    Raises:
        UserError: the class does not exist, or the class of a norm or position component is not an nn.Module.
    """
    try:
        found = load_class(type_, kind)
    except UserError as error:
        key = next(key for key, one in CUSTOM_COMPONENT_KEYS.items() if one == kind)
        raise UserError(f"model.{key}: {error}") from None
    factory = partial(found, *arguments)
    component = factory()
    if kind in ("norm", "position") and not isinstance(component, nn.Module):
        raise UserError(f"model.{kind}: {type_} is not an nn.Module; derive the class from torch.nn.Module")
    if isinstance(component, nn.Module):
        FACTORIES[component] = factory
    return component


def custom_component_value(model: nn.Module, name: str, seed: int) -> torch.Tensor | None:
    """Returns the initial value of a custom component's parameter or buffer; None for other parameters.

    The component is created again on the CPU. `seed` and the component's name seed PyTorch's random generator.
    """
    path = name.split(".")
    for depth in range(1, len(path)):
        prefix = ".".join(path[:depth])
        factory = FACTORIES.get(model.get_submodule(prefix))
        if factory is not None:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(derive_seed(seed, prefix))
                component = factory()
            inner = ".".join(path[depth:])
            return (dict(component.named_parameters()) | dict(component.named_buffers()))[inner].detach()
    return None


def derive_seed(seed: int, name: str) -> int:
    """Returns a 64-bit seed that depends on `seed` and `name` only."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
