"""Shows progress: a live bar, plain lines, or nothing. `Console.progress` returns one of these displays."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from weft import formatting

# Fields with the lowest importance are left out first on a narrow terminal. Other fields have importance 5.
_IMPORTANCE = {"loss": 8, "tokens_per_second": 7.8}


class Count:
    """Tracks the amount of work done, the speed over about the last half minute, and the remaining time.

    Args:
        total: number of units; None if unknown.
        start: number of units done earlier.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, total: int | None, description: str, unit: str, start: int, clock: Callable[[], float] = time.monotonic
    ):
        self.total, self.description, self.unit, self.start, self.done = total, description, unit, start, start
        self.fields: dict[str, Any] = {}
        self.clock, self.began = clock, clock()
        self._marks: deque[tuple[float, int]] = deque([(self.began, start)], maxlen=31)

    def update(self, done: int, fields: dict[str, Any]) -> None:
        self.done = done
        self.fields |= fields
        for name in [name for name, value in fields.items() if value is None]:
            del self.fields[name]
        now = self.clock()
        if now - self._marks[-1][0] >= 1 or len(self._marks) == 1:
            self._marks.append((now, done))

    @property
    def elapsed(self) -> float:
        return self.clock() - self.began

    @property
    def rate(self) -> float | None:
        """Units per second over about the last half minute; None if unknown.

        The first unit, which may include compilation, therefore counts only in the first half minute.
        """
        (then, done_then), (now, done_now) = self._marks[0], self._marks[-1]
        return (done_now - done_then) / (now - then) if now > then and done_now > done_then else None

    @property
    def remaining(self) -> float | None:
        """Estimated seconds to the end of the work; None if unknown."""
        if self.total is None or self.rate is None:
            return None
        since = self.clock() - self._marks[-1][0]
        return max((self.total - self._marks[-1][1]) / self.rate - since, 0.0)

    def amount(self) -> str:
        """Returns the number of units done as text: `120/1000`, or in bytes `1.5/4.0 MB`."""
        return formatting.progress(self.done, self.total, self.unit)

    def speed(self, average: bool = False) -> str | None:
        """Returns the speed as text; None if a field already shows a speed (tokens/s), or if no unit is done yet.

        Args:
            average: return the mean speed since the start, instead of the current speed.
        """
        if any(name.endswith("_per_second") for name in self.fields):
            return None
        rate = (self.done - self.start) / self.elapsed if average and self.elapsed > 0 else self.rate
        return formatting.rate(rate, self.unit) if rate else None


class SilentProgress:
    """A progress display that shows nothing, for processes without output."""

    def update(self, done: int, **fields: Any) -> None:
        """Sets the number of units done, including the first `start` units. `fields`: see `Console.progress`."""

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class PlainProgress(SilentProgress):
    """A progress display of complete lines, for logs and pipes.

    A line is printed at the start, at the first update, every `interval` seconds, and at the end. In long runs the
    interval grows to a sixtieth of the elapsed time, at most a minute.
    """

    def __init__(
        self,
        print_line: Callable[[str], None],
        total: int | None,
        description: str,
        unit: str,
        start: int,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._print, self._interval = print_line, interval
        self._count = Count(total, description, unit, start, clock)
        self._printed = float("-inf")

    def __enter__(self):
        self._print_line()
        self._printed = float("-inf")  # the first update is printed immediately
        return self

    def update(self, done: int, **fields: Any) -> None:
        self._count.update(done, fields)
        pause = max(self._interval, min(self._count.elapsed / 60, 60.0))
        if self._count.clock() - self._printed >= pause and done != self._count.total:  # `__exit__` prints the end
            self._print_line()

    def __exit__(self, kind, error, trace) -> None:
        if self._count.done != self._count.start or self._count.total == self._count.start:
            self._print_line(last=True)

    def _print_line(self, last: bool = False) -> None:
        count = self._count
        head = count.unit if count.unit == "step" else count.description or ("" if count.unit == "B" else count.unit)
        parts = [f"{head} {count.amount()}".strip()]
        if count.unit not in ("step", "B") and count.description:
            parts[0] += f" {formatting.plural_of(count.unit)}"
        parts += [formatting.metric(name, value) for name, value in count.fields.items()]
        if (speed := count.speed(average=last)) is not None:
            parts.append(speed)
        if last:
            parts.append(f"took {formatting.duration(count.elapsed)}")
        elif count.done != count.start and (remaining := count.remaining) is not None:
            parts.append(f"ETA {formatting.duration(remaining)}")
        self._printed = count.clock()
        self._print("  ".join(parts))


def _bypass_bar() -> None:
    """Restores stdout and stderr in a forked child, which may have inherited a held lock of the progress bar."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


class LiveProgress(SilentProgress):
    """A progress bar on a terminal, which a thread redraws four times a second.

    The least important fields are left out if the line does not fit.
    """

    _watching_forks = False

    def __init__(self, console: Any, total: int | None, description: str, unit: str, start: int):
        self._console, self._count = console, Count(total, description, unit, start)
        self._live: Any = None
        self._ended = False

    def __enter__(self):
        from rich.live import Live

        if not LiveProgress._watching_forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_bypass_bar)
            LiveProgress._watching_forks = True
        self._live = Live(
            self,
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # a piped stdout is not redirected
            redirect_stderr=True,
        )
        self._live.__enter__()
        return self

    def update(self, done: int, **fields: Any) -> None:
        self._count.update(done, fields)

    def __exit__(self, kind, error, trace) -> None:
        self._ended = True
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    @property
    def showing(self) -> bool:
        """Whether the bar is on the terminal now."""
        return self._live is not None and not self._ended

    def _pieces(self) -> list[tuple[str, str, float]]:
        """Returns (text, style, importance) of each part of the line, except the bar."""
        count, remaining = self._count, None if self._ended else self._count.remaining
        fields = [(formatting.metric(name, v), _IMPORTANCE.get(name, 5)) for name, v in dict(count.fields).items()]
        if (speed := count.speed(average=self._ended)) is not None:
            fields.append((speed, 7.8))
        pieces = [
            (count.description, "bold", 2),
            (count.amount(), "", 9),
            *((text, "cyan" if i == 0 else "", weight - i / 100) for i, (text, weight) in enumerate(fields)),
            ("" if remaining is None else f"ETA {formatting.duration(remaining)}", "green", 7.5),
            (("took " if self._ended else "") + formatting.duration(count.elapsed), "dim", 0),
        ]
        return [piece for piece in pieces if piece[0]]

    def __rich__(self) -> Any:
        from rich.text import Text

        count, pieces = self._count, self._pieces()
        share = None if not count.total else min(count.done / count.total, 1.0)
        percent = "" if share is None else f"{share:4.0%}"
        room = self._console.width - len(percent) - 2
        while len(pieces) > 1 and sum(len(text) + 2 for text, _, _ in pieces) > room - (12 if share is not None else 0):
            pieces.remove(min(pieces, key=lambda piece: piece[2]))
        line = Text(no_wrap=True, overflow="crop", end="")
        if pieces and pieces[0][1] == "bold":
            line.append(pieces.pop(0)[0] + "  ", "bold")
            room -= len(line)
        if share is not None:
            bar = min(room - sum(len(text) + 2 for text, _, _ in pieces), 40)
            if bar >= 6:
                full = int(bar * share)
                line.append("━" * full, "green" if self._ended and share == 1 else "cyan")
                line.append("━" * (bar - full) if self._console.color_system else " " * (bar - full), "grey30")
                line.append(" ")
            line.append(percent + "  ")
        for i, (text, style, _) in enumerate(pieces):
            line.append(("  " if i else "") + text, style)
        return line
