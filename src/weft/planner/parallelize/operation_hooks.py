"""What runs in the place of custom operations while a module is captured, or an operation is tried without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


def run(function: Callable, annotation: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on local tensors."""
    return function(*args, **kwargs)


@dataclass
class Hooks:
    """What runs in the place of custom operations.

    Attributes:
        capture: (operation, args, kwargs) -> results, while a graph is recorded; None otherwise.
        run: (function, annotation, args, kwargs) -> results, on local tensors.
    """

    capture: Callable | None = None
    run: Callable = run


hooks = Hooks()


@contextmanager
def captured_by(function: Callable | None) -> Iterator[None]:
    """Context in which a function records the calls of custom operations; with None, the operations run."""
    before, hooks.capture = hooks.capture, function
    try:
        yield
    finally:
        hooks.capture = before


@contextmanager
def run_by(function: Callable | None) -> Iterator[None]:
    """Context in which a function runs custom operations on local tensors; with None, they run themselves."""
    before, hooks.run = hooks.run, function or run
    try:
        yield
    finally:
        hooks.run = before
