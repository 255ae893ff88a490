"""Defines `UserError` and `ConfigError`, the errors that users can correct, and describes exceptions for messages."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


class UserError(Exception):
    """An error that the user can correct. The command line prints only its message and exits with code 2.

    >>> try:
    ...     weft.load_model("nowhere")
    ... except weft.UserError as error:
    ...     print(error)
    nowhere: this path does not exist; give a run directory or a checkpoint

    Args:
        what: what is wrong and what to do about it, in one line ("...; ...").
        where: the path of the file with the error, if any.
        line: the line number in that file, counted from 1.

    Attributes:
        quiet: whether another rank reports the error, so that this rank only exits.
    """

    quiet = False

    def __init__(self, what: str, where: str | Path | None = None, line: int | None = None):
        self.what, self.where, self.line = what, where, line
        super().__init__(_place(where, line) + what)


@dataclass(frozen=True)
class Problem:
    """One error in a configuration.

    Attributes:
        key: the dotted key, such as "optimizer.lr".
        what: what is wrong and what to do about it.
        file: the path of the file with the error, or "command line".
        line: the line number in that file, counted from 1.
    """

    key: str
    what: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return _place(self.file, self.line) + (f"{self.key}: " if self.key else "") + self.what


class ConfigError(UserError):
    """All errors of one configuration. `str()` returns one line for each error."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        Exception.__init__(self, "\n".join(map(str, self.problems)))


def _place(where: str | Path | None, line: int | None) -> str:
    """Returns the prefix of a message: `path: ` or `path:line: `. Unprintable characters in the path are escaped."""
    if where is None:
        return ""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(where))
    return f"{shown}: " if line is None else f"{shown}:{line}: "


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the memory of this machine or of a GPU is full."""
    full = isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))
    return isinstance(error, MemoryError) or bool(full)


def is_user_file(file: str) -> bool:
    """Whether a source file is the user's code: not a file of Weft, Python, an installed package, or a compiler."""
    path = Path(file)
    if file.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    others = [Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))]
    if compiled := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        others.append(Path(compiled))  # where torch.compile writes the code that it generates
    return not any(path.resolve().is_relative_to(root.resolve()) for root in others)


def user_frames(error: BaseException, module_file: str | None = None) -> list[TracebackType]:
    """Returns the entries of the exception's traceback that are in the user's code, outermost first.

    Args:
        module_file: a file that counts as the user's code even if it belongs to an installed package, such as a plugin.
    """
    found, entry = [], error.__traceback__
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if file == module_file or is_user_file(file):
            found.append(entry)
        entry = entry.tb_next
    return found


def describe_user_exception(error: BaseException, module_file: str | None = None) -> str | None:
    """Returns the innermost line of the user's code and the exception, such as `my.py:12: ValueError: ...`.

    Returns None if the traceback has no line of the user's code.
    """
    frames = user_frames(error, module_file)
    if not frames:
        return None
    return f"{short_path(frames[-1].tb_frame.f_code.co_filename)}:{frames[-1].tb_lineno}: {describe_exception(error)}"


def describe_exception(error: BaseException) -> str:
    """Returns the type and the text of an exception in one line, such as `ValueError: the text`."""
    what = " ".join(str(error).split())
    return type(error).__name__ + (f": {what}" if what else "")


def short_path(file: str) -> str:
    """Returns a path relative to the working directory; unchanged if the file is not below this directory."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def reported_elsewhere(error: UserError) -> bool:
    """Whether another rank reports the error.

    All ranks read the same configuration, so only local rank 0 reports a `ConfigError`.
    """
    return error.quiet or (isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK", "0") != "0")
