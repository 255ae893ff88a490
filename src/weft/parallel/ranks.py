"""Runs actions on all ranks of the default process group, and raises an error of one rank on all, so none hangs."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from weft.errors import UserError

T = TypeVar("T")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if distributed() else 1


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the values of all ranks, in the order of ranks, on every rank.

    Args:
        group: a process group of all ranks. A thread beside the training needs a group of its own.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group)
    return values


def broadcast_object(value: T) -> T:
    """Returns the value of rank 0, on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def agree(action: Callable[[], T], only_first: bool = False, group: dist.ProcessGroup | None = None) -> T:
    """Runs `action` on all ranks and returns its result. If `action` raises on any rank, all ranks raise.

    Args:
        action: a function without collectives: if it raised on one rank, other ranks would wait in a collective.
        only_first: whether to run `action` only on rank 0, and return rank 0's result on all ranks.
        group: a process group of all ranks (see `all_gather_object`).

    Raises:
        Exception: if `action` raises on any rank: the exception of the lowest such rank. If this exception is a
            UserError, only rank 0 prints it, and the text begins with `rank N: ` if the failed rank N is not 0.
    """
    if world_size() == 1:
        return action()
    result, failure = None, None
    if rank() == 0 or not only_first:
        try:
            result = action()
        except Exception as error:
            failure = error
    answers = all_gather_object((_picklable(failure), result if only_first else None), group)
    for number, (other, _) in enumerate(answers):
        if isinstance(other, UserError):
            raise error_on_all_ranks(str(other) if number == 0 else f"rank {number}: {other}")
        if other is not None and failure is not None and number == rank():
            raise failure
        if other is not None:
            other.__dict__["elsewhere"] = True  # `launch.failures` lets the rank that failed report it
            raise other
    return cast(T, answers[0][1] if only_first else result)


def error_on_all_ranks(text: str) -> UserError:
    """Returns a `UserError` that all ranks must raise, and that only rank 0 prints."""
    error = UserError(text)
    error.quiet = rank() != 0
    return error


def distinct_values(value: Any) -> list[Any]:
    """Returns the distinct values among all ranks' JSON values. If all are equal, ranks communicate only digests."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    digests = all_gather_object(digest)
    if len(set(digests)) == 1:
        return [value]
    first = {digest: number for number, digest in reversed(list(enumerate(digests)))}
    return [other for other in all_gather_object(value if first[digest] == rank() else None) if other is not None]


def _picklable(failure: Exception | None) -> Exception | None:
    """Returns the exception, or a RuntimeError with the exception's text if it cannot be pickled."""
    if failure is None:
        return None
    try:
        return pickle.loads(pickle.dumps(failure))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RuntimeError(f"{type(failure).__name__}: {failure}")
