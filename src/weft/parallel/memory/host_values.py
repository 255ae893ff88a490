"""Remembers numbers that the host has read from a device in a forward pass, for its recomputation in backward.

A host that reads a number waits for the device, and the ranks may communicate before. Activation checkpointing runs a
block twice, so without `once`, it would wait twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")
_thread = threading.local()  # backward runs in a thread of its own for each GPU


def once(compute: Callable[[], T]) -> T:
    """Returns `compute()`. In the recomputation of a checkpointed forward pass, returns what that pass returned.

    A forward pass and its recomputation must call this function in the same order. `compute` must not depend on
    anything that needs a gradient.
    """
    values, position = getattr(_thread, "values", None), getattr(_thread, "position", 0)
    if values is not None and position < len(values):
        _thread.position = position + 1
        return values[position]
    outer, _thread.computing = is_computing(), True
    try:
        value = compute()
    finally:
        _thread.computing = outer
    if values is not None:
        values.append(value)
        _thread.position = position + 1
    return value


def is_computing() -> bool:
    """Whether this thread is in `compute` of `once`, whose operations recomputation does not repeat."""
    return getattr(_thread, "computing", False)


def remembering() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns two contexts for `torch.utils.checkpoint`: of a forward pass, and of its recomputation, which can run
    several times.
    """
    values: list[Any] = []
    return _Using(values), _Using(values)


class _Using(AbstractContextManager[None]):
    """Context in which `once` uses `values`, from the first one on. It can be entered several times, and nested."""

    def __init__(self, values: list[Any]):
        self.values, self.outer = values, []

    def __enter__(self) -> None:
        self.outer.append((getattr(_thread, "values", None), getattr(_thread, "position", 0)))
        _thread.values, _thread.position = self.values, 0

    def __exit__(self, *_: Any) -> None:
        _thread.values, _thread.position = self.outer.pop()
