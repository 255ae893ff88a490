"""What Weft says when the user has made a mistake: one line each, what, where, what to do."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class UserError(Exception):
    """A mistake that the user can mend. The command line prints its text (no traceback) and exits with 2.

    >>> try:
    ...     weft.load_model("nowhere")
    ... except weft.UserError as error:
    ...     print(error)
    nowhere: there is no such run or checkpoint; give a run directory or a checkpoint in it

    Args:
        what: what is wrong and what to do about it, in one line ("...; ...").
        where: the file it is in, if it is in one.
        line: the line in that file, counted from 1.

    Attributes:
        quiet: another rank says it; this one only leaves.
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
    """All the problems of one configuration, found in one pass; `str()` has one line for each."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        Exception.__init__(self, "\n".join(map(str, self.problems)))


def _place(where: str | Path | None, line: int | None) -> str:
    """`path:line: `. A file's name may hold a line end or an escape sequence: the message stays one plain line."""
    if where is None:
        return ""
    shown = str(where)
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return f"{shown}: " if line is None else f"{shown}:{line}: "


def is_own(file: str) -> bool:
    """Whether a source file is the user's: neither Weft's, nor Python's, nor an installed package's."""
    path = Path(file)
    if file.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    ours = [Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))]
    return not any(path.resolve().is_relative_to(root.resolve()) for root in ours)


def told_of_own(error: BaseException, module_file: str | None = None) -> str | None:
    """`my.py:12: ValueError: ...`: what the user's own code raised, with the innermost line of it.

    Args:
        module_file: a file that counts as the user's wherever it is: that of a plugin.

    Returns:
        None if `error` did not come from there.
    """
    steps = traceback.extract_tb(error.__traceback__)
    own = [step for step in steps if step.filename == module_file or is_own(step.filename)]
    return f"{short_path(own[-1].filename)}:{own[-1].lineno}: {told_type(error)}" if own else None


def told_type(error: BaseException) -> str:
    """`ValueError: what it says`, in one line."""
    what = " ".join(str(error).split())
    return type(error).__name__ + (f": {what}" if what else "")


def short_path(file: str) -> str:
    """The path from the working directory, if the file is below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def told_by_another(error: UserError) -> bool:
    """Whether this rank need not tell it: all ranks read the same file, and the first on each machine speaks of it."""
    return error.quiet or (isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK", "0") != "0")
