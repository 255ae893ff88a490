"""Runs the compilers of other tools, for export targets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import UserError


@contextmanager
def lowering(target: str, remedy: str) -> Iterator[None]:
    """Context manager of a tool's compiler, which hides its warnings and converts its exceptions to UserErrors.

    Compilers warn of deprecated functions that they call themselves, and raise exceptions of many classes, such as
    AssertionError, for an operator that they do not know.

    Args:
        target: name of the target, for messages.
        remedy: end of the message: what to do.

    Raises:
        UserError: the compiler raised an exception.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise UserError(f"--to {target} cannot compile this model ({what}); {remedy}") from error
