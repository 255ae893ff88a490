"""How the ranks agree while they save and load: what fails on one fails on all, so that none waits for ever."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if distributed() else 0


def world() -> int:
    return dist.get_world_size() if distributed() else 1


def gather(value: T) -> list[T]:
    """Every rank's `value`, in the order of ranks, on every rank."""
    if not distributed():
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def gather_different(value: Any) -> list[Any]:
    """The different JSON values among the ranks. Mostly all are one, and then only their digests travel."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    digests = gather(digest)
    if len(set(digests)) == 1:
        return [value]
    first = {digest: number for number, digest in reversed(list(enumerate(digests)))}
    return [other for other in gather(value if first[digest] == rank() else None) if other is not None]


def everywhere(action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank; all the results on every rank.

    Raises:
        Exception: the first rank's that failed, on all ranks.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    if not distributed():
        if failure is not None:
            raise failure
        return [result]  # type: ignore[list-item]
    answers = gather((result, _portable(failure)))
    for number, (_, other) in enumerate(answers):
        if other is not None:
            raise failure if number == rank() and failure is not None else other
    return [answer for answer, _ in answers]


def on_first(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; its result on every rank. What it raises, all ranks raise."""
    return everywhere(lambda: action() if rank() == 0 else None)[0]  # type: ignore[return-value]


def _portable(failure: Exception | None) -> Exception | None:
    """The exception, if it can travel to another rank; else its text in a RuntimeError."""
    if failure is None:
        return None
    try:
        return pickle.loads(pickle.dumps(failure))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RuntimeError(f"{type(failure).__name__}: {failure}")
