"""Parts of a decoder that are classes of the user's own: `model.norm: my_parts:MyNorm` and the like (docs/parts.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weft.config.components import load_class
from weft.config.custom_components import OWN_PARTS
from weft.errors import UserError

MAKERS: WeakKeyDictionary[nn.Module, Callable[[], nn.Module]] = WeakKeyDictionary()  # how each part was made


def own_part(type_: str, room: str, *arguments: Any) -> Any:
    """Make the part that `module:Class` means.

    A module remembers how it was made: a decoder is built without values, and its initial ones come from another.

    Raises:
        UserError: there is no such class; or a norm or a position scheme that is no nn.Module.
    """
    try:
        found = load_class(type_, room)
    except UserError as error:
        key = next(key for key, kind in OWN_PARTS.items() if kind == room)
        raise UserError(f"model.{key}: {error}") from None
    make = partial(found, *arguments)
    part = make()
    if room in ("norm", "position") and not isinstance(part, nn.Module):
        raise UserError(f"model.{room}: {type_} is no nn.Module; derive the class from torch.nn.Module")
    if isinstance(part, nn.Module):
        MAKERS[part] = make
    return part


def custom_component_value(model: nn.Module, name: str, seed: int) -> torch.Tensor | None:
    """The initial value of a parameter or buffer that belongs to a part of the user's own; None for all others.

    The part is made anew on the CPU, with PyTorch's generator seeded by `seed` and the part's name alone.
    """
    path = name.split(".")
    for depth in range(1, len(path)):
        prefix = ".".join(path[:depth])
        make = MAKERS.get(model.get_submodule(prefix))
        if make is not None:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(derive_seed(seed, prefix))
                made = make()
            inner = ".".join(path[depth:])
            return (dict(made.named_parameters()) | dict(made.named_buffers()))[inner].detach()
    return None


def derive_seed(seed: int, name: str) -> int:
    """A generator's seed of 64 bits for one name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
