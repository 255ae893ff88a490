"""Prints the output of one process: a live progress bar on a terminal, plain lines elsewhere.

Progress, notes and warnings go to stderr. Results (samples, tables, the path of a report) go to stdout, for pipes. A
closed terminal or pipe silences the console and never stops a training run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO, cast

from weft.formatting import cell
from weft.observe.progress import LiveProgress, PlainProgress, SilentProgress

# Generated text can contain escape sequences, which must not move the cursor or recolor the user's terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Console:
    """The output of a run. Only one process has `prints=True`; in the other processes, the methods print nothing.

    Args:
        prints: whether this process prints.
        out: the stream for results. By default, `sys.stdout` at the time of the call.
        err: the stream for notes, warnings and progress. By default, `sys.stderr` at the time of the call.
        interval: minimum number of seconds between two plain progress lines (see `PlainProgress`).
    """

    def __init__(
        self, prints: bool = True, *, out: TextIO | None = None, err: TextIO | None = None, interval: float = 5.0
    ):
        self.prints = prints
        self._out, self._err, self._interval = out, _FailSilentStream(err), interval
        self._rich: Any = None
        self._bar: LiveProgress | None = None

    @property
    def live(self) -> bool:
        """Whether stderr is a terminal that can show a progress bar: with UTF-8, and a TERM other than dumb."""
        if os.environ.get("TERM", "") in ("", "dumb", "unknown") and os.name != "nt":
            return False
        return self._err.isatty() and self._err.encoding.lower().replace("-", "").startswith("utf8")

    def line(self, text: str = "", style: str | None = None) -> None:
        """Prints a note on stderr, above the progress bar if a bar is shown."""
        if self.prints:
            self._print(_CONTROL.sub("", text), style)

    def warning(self, text: str) -> None:
        """Prints a warning on stderr."""
        self.line(f"warning: {text}", style="yellow")

    def result(self, text: str = "", end: str = "\n") -> None:
        """Prints a result of the command on stdout.

        Raises:
            BrokenPipeError: the reader closed the pipe (`weft ... | head`). The command line then exits without a
                message.
        """
        if self.prints:
            out = self._out or sys.stdout
            encoding = getattr(out, "encoding", None) or "utf-8"
            out.write((_CONTROL.sub("", text) + end).encode(encoding, "replace").decode(encoding))
            out.flush()

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Prints a result as a table. Columns of numbers are right-aligned, and have thousands separators."""
        rows = [list(row) for row in rows]
        cells = [list(header), *([cell(value) for value in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = [bool(rows) and all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]
        for row in cells:
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            self.result("  ".join(padded).rstrip())

    def progress(self, total: int | None, description: str = "", unit: str = "step", start: int = 0) -> SilentProgress:
        """Returns a context manager that shows progress. Its method `update(done, **fields)` returns in microseconds.

        The fields (loss, lr, tokens_per_second, ...) are shown in the order in which they were first passed. A field
        stays until its next value; None removes the field.

        Args:
            total: number of units; None if unknown.
            description: the work, such as "packing". Plain lines omit the description if `unit` is "step".
            unit: the unit in the singular; "B" counts bytes and shows MB and MB/s.
            start: number of units done earlier, as in a resumed run; these units do not count for the speed.
        """
        if not self.prints or (self._bar is not None and self._bar.showing):  # one bar at a time
            return SilentProgress()
        if self.live:
            self._bar = LiveProgress(self._rich_console(), total, description, unit, start)
            return self._bar
        return PlainProgress(self._print, total, description, unit, start, self._interval)

    def _print(self, text: str, style: str | None = None) -> None:
        if self.live:
            self._rich_console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            self._err.write(text + "\n")
            self._err.flush()

    def _rich_console(self) -> Any:
        if self._rich is None:
            from rich.console import Console as RichConsole  # takes 40 ms, which `weft --help` need not wait for

            self._rich = RichConsole(file=cast(TextIO, self._err))
        return self._rich


class _FailSilentStream:
    """A stream that ignores output after a failed write, and replaces characters that its encoding lacks."""

    def __init__(self, stream: TextIO | None):
        self._stream, self._dead = stream, False

    @property
    def stream(self) -> Any:
        if self._stream is not None:
            return self._stream
        # A live bar replaces sys.stderr by a proxy. If the bar wrote to the proxy, the call would never return.
        return sys.__stderr__ if hasattr(sys.stderr, "rich_proxied_file") else sys.stderr

    @property
    def encoding(self) -> str:
        return getattr(self.stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._attempt("write", text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        self._attempt("flush")

    def _attempt(self, method: str, *arguments: str) -> None:
        if not self._dead and self.stream is not None:
            try:
                getattr(self.stream, method)(*arguments)
            except (OSError, ValueError):  # closed pipe, lost terminal, closed file
                self._dead = True

    def isatty(self) -> bool:
        try:
            return not self._dead and self.stream is not None and self.stream.isatty()
        except ValueError:  # closed
            return False

    def fileno(self) -> int:
        return self.stream.fileno()
