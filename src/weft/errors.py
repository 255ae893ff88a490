"""Errors of the user: one line each, with what is wrong, where, and what to do."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


class UserError(Exception):
    """A mistake that the user can correct. The command line prints its text without a traceback and exits with code 2.

    >>> try:
    ...     weft.load_model("nowhere")
    ... except weft.UserError as error:
    ...     print(error)
    nowhere: there is no such run or checkpoint; give a run directory or a checkpoint in it

    Args:
        what: what is wrong and what to do about it, in one line ("...; ...").
        where: the file that it is about, if any.
        line: the line in that file, counted from 1.

    Attributes:
        quiet: another rank reports it, and this one only exits.
    """

    quiet = False

    def __init__(self, what: str, where: str | Path | None = None, line: int | None = None):
        self.what, self.where, self.line = what, where, line
        super().__init__(_place(where, line) + what)


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration. `key` is dotted ("optimizer.lr"); `file` may be "command line"."""

    key: str
    what: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return _place(self.file, self.line) + (f"{self.key}: " if self.key else "") + self.what


class ConfigError(UserError):
    """All problems of one configuration; `str()` has one line for each."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        Exception.__init__(self, "\n".join(map(str, self.problems)))


def _place(where: str | Path | None, line: int | None) -> str:
    """Returns `path:line: `, with line ends and escape sequences in the path escaped."""
    if where is None:
        return ""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(where))
    return f"{shown}: " if line is None else f"{shown}:{line}: "


def is_user_file(file: str) -> bool:
    """Whether a source file is the user's: not of Weft, Python, or an installed package."""
    path = Path(file)
    if file.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    others = [Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))]
    return not any(path.resolve().is_relative_to(root.resolve()) for root in others)


def user_frames(error: BaseException, module_file: str | None = None) -> list[TracebackType]:
    """Returns the entries of the traceback that are in the user's code, outermost first.

    Args:
        module_file: a file that counts as the user's wherever it is, such as a plugin's.
    """
    found, entry = [], error.__traceback__
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if file == module_file or is_user_file(file):
            found.append(entry)
        entry = entry.tb_next
    return found


def describe_user_exception(error: BaseException, module_file: str | None = None) -> str | None:
    """Returns `my.py:12: ValueError: ...`, with the innermost line in the user's code; None if there is none."""
    frames = user_frames(error, module_file)
    if not frames:
        return None
    return f"{short_path(frames[-1].tb_frame.f_code.co_filename)}:{frames[-1].tb_lineno}: {describe_exception(error)}"


def describe_exception(error: BaseException) -> str:
    """Returns `ValueError: its text`, in one line."""
    what = " ".join(str(error).split())
    return type(error).__name__ + (f": {what}" if what else "")


def short_path(file: str) -> str:
    """Returns the path relative to the working directory, if the file is below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def reported_elsewhere(error: UserError) -> bool:
    """Whether another rank reports the error: all ranks read the same config, and local rank 0 reports its problems."""
    return error.quiet or (isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK", "0") != "0")
