"""What Weft says when the user has made a mistake: one line each, what, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class UserError(Exception):
    """A mistake that the user can mend. The command line prints its text (no traceback) and exits with 2.

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
        place = "" if where is None else f"{where}: " if line is None else f"{where}:{line}: "
        super().__init__(place + what)


@dataclass(frozen=True)
class Problem:
    """One mistake in a configuration. `key` is dotted ("optimizer.lr"); `file` may be "command line"."""

    key: str
    what: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = "" if self.file is None else f"{self.file}: " if self.line is None else f"{self.file}:{self.line}: "
        return place + (f"{self.key}: " if self.key else "") + self.what


class ConfigError(UserError):
    """All the problems of one configuration, found in one pass; `str()` has one line for each."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        Exception.__init__(self, "\n".join(map(str, self.problems)))
