"""What one process says while it works: a live bar on a terminal, plain lines elsewhere.

Progress, notes and warnings go to stderr; results (samples, tables, the report's path) to stdout, so that they can be
piped. A terminal that goes away, or a pipe that is closed, silences the console: it never stops a training run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO, cast

from weft.formatting import cell
from weft.observe.progress import LiveProgress, PlainProgress, SilentProgress

# Generated text may hold escape sequences: they must not move the cursor or recolour the user's terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Console:
    """Speaks for a whole run, so only one process of it has `speaks=True`; in the others every method is silent.

    Args:
        speaks: whether this process is the one.
        out, err: the streams; default: `sys.stdout` and `sys.stderr` at the time of the call.
        interval: the fewest seconds between two plain progress lines (longer runs speak less often, see PlainProgress).
    """

    def __init__(
        self, speaks: bool = True, *, out: TextIO | None = None, err: TextIO | None = None, interval: float = 5.0
    ):
        self.speaks = speaks
        self._out, self._err, self._interval = out, _Forgiving(err), interval
        self._rich: Any = None
        self._bar: LiveProgress | None = None

    @property
    def live(self) -> bool:
        """Whether stderr is a terminal that can show a bar (it knows UTF-8 and its TERM is not dumb)."""
        if os.environ.get("TERM", "") in ("", "dumb", "unknown") and os.name != "nt":
            return False
        return self._err.isatty() and self._err.encoding.lower().replace("-", "").startswith("utf8")

    def line(self, text: str = "") -> None:
        """A note, on stderr; above the bar if one is shown."""
        if self.speaks:
            self._say(_CONTROL.sub("", text))

    def warning(self, text: str) -> None:
        """A note that something is not as the user may think."""
        if self.speaks:
            self._say(_CONTROL.sub("", f"warning: {text}"), style="yellow")

    def result(self, text: str = "", end: str = "\n") -> None:
        """What the command was asked for, on stdout.

        Raises:
            BrokenPipeError: the reader went away (`weft ... | head`); the command line ends quietly on it.
        """
        if self.speaks:
            out = self._out or sys.stdout
            encoding = getattr(out, "encoding", None) or "utf-8"
            out.write((_CONTROL.sub("", text) + end).encode(encoding, "replace").decode(encoding))
            out.flush()

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A result as aligned columns; numbers to the right, thousands set apart."""
        rows = [list(row) for row in rows]
        cells = [list(header), *([cell(value) for value in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = [bool(rows) and all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]
        for row in cells:
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            self.result("  ".join(padded).rstrip())

    def progress(self, total: int | None, description: str = "", unit: str = "step", start: int = 0):
        """A context manager with `.update(done, **fields)`.

        Args:
            total: how many units there are in all; None if that is not known.
            description: what is being done ("packing"). Plain lines of steps leave it out: "step 3/10" says it.
            unit: what is counted, in the singular; "B" counts bytes and shows MB and MB/s.
            start: how many were done before (a resumed run); they do not count for the speed.

        `fields` are shown in the order first given: loss, lr, tokens_per_second, ... A field stays until it is given
        anew; None removes it. Updating costs microseconds; drawing happens a few times a second on a thread of its own.
        """
        if not self.speaks:
            return SilentProgress()
        if self._bar is not None and self._bar.showing:
            return SilentProgress()  # within another: one bar at a time
        if self.live:
            self._bar = LiveProgress(self._rich_console(), total, description, unit, start)
            return self._bar
        return PlainProgress(self._say, total, description, unit, start, self._interval)

    def _say(self, text: str, style: str | None = None) -> None:
        if self.live:
            self._rich_console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            self._err.write(text + "\n")
            self._err.flush()

    def _rich_console(self) -> Any:
        if self._rich is None:
            from rich.console import Console as RichConsole  # lazily: it takes 40 ms that `weft --help` does not have

            self._rich = RichConsole(file=cast(TextIO, self._err))
        return self._rich


class _Forgiving:
    """stderr that turns silent, instead of raising, when nobody is at the other end; characters that its encoding
    lacks are replaced."""

    def __init__(self, stream: TextIO | None):
        self._stream, self._dead = stream, False

    @property
    def stream(self) -> Any:
        return self._stream if self._stream is not None else sys.__stderr__ if _proxied(sys.stderr) else sys.stderr

    @property
    def encoding(self) -> str:
        return getattr(self.stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if not self._dead and self.stream is not None:
            try:
                self.stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError):  # closed pipe, lost terminal, closed file
                self._dead = True
        return len(text)

    def flush(self) -> None:
        if not self._dead and self.stream is not None:
            try:
                self.stream.flush()
            except (OSError, ValueError):
                self._dead = True

    def isatty(self) -> bool:
        try:
            return not self._dead and self.stream is not None and self.stream.isatty()
        except ValueError:  # closed
            return False

    def fileno(self) -> int:
        return self.stream.fileno()


def _proxied(stream: Any) -> bool:
    """Whether a live display stands in for the stream (writing to it from the display itself would never end)."""
    return hasattr(stream, "rich_proxied_file")
