"""How the ranks of the default process group agree: what fails on one fails on all, so that none waits for ever."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from weft.errors import UserError

T = TypeVar("T")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if distributed() else 0


def world() -> int:
    return dist.get_world_size() if distributed() else 1


def gather(value: T) -> list[T]:
    """Every rank's `value`, in the order of ranks, on every rank."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def agree(action: Callable[[], T], only_first: bool = False) -> T:
    """Do `action` on all ranks (or on the first, whose result all get) and raise together the user's mistakes.

    Without it, a rank that stops at a mistake leaves the others waiting, and N ranks say one thing N times.

    Raises:
        UserError: the first rank's, or with the number of the first rank that raised one; quiet on other ranks.
    """
    if world() == 1:
        return action()
    result, text = None, None
    if rank() == 0 or not only_first:
        try:
            result = action()
        except UserError as mistake:
            text = str(mistake)
    answers = gather((text, result if only_first else None))
    for number, (text, _) in enumerate(answers):
        if text is not None:
            together = UserError(text if number == 0 else f"rank {number}: {text}")
            together.quiet = rank() != 0
            raise together
    return cast(T, answers[0][1] if only_first else result)


def mistake(text: str) -> UserError:
    """An error to raise for a mistake that all ranks find; the first one reports it."""
    error = UserError(text)
    error.quiet = rank() != 0
    return error


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
    if world() == 1:
        return [action()]
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    answers = gather((result, _portable(failure)))
    for number, (_, other) in enumerate(answers):
        if other is not None:
            if isinstance(other, UserError):
                other.quiet = number != rank()  # that rank reports it
            raise failure if number == rank() and failure is not None else other
    return [cast(T, answer) for answer, _ in answers]


def on_first(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; its result on every rank. What it raises, all ranks raise."""
    return cast(T, everywhere(lambda: action() if rank() == 0 else None)[0])


def _portable(failure: Exception | None) -> Exception | None:
    """The exception, if it can travel to another rank; else its text in a RuntimeError."""
    if failure is None:
        return None
    try:
        return pickle.loads(pickle.dumps(failure))
    except (pickle.PicklingError, TypeError, AttributeError):
        return RuntimeError(f"{type(failure).__name__}: {failure}")
