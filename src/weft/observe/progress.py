"""How progress is counted and shown: a live bar, plain lines, or nothing. Made by `Console.progress`."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from weft import formatting

# What a narrow terminal keeps the longest; other fields weigh 5.
_IMPORTANCE = {"loss": 8, "tokens_per_second": 7.8}


class Count:
    """How far the work is, how fast it goes (over the last half minute or so), and how long it will take.

    Args:
        clock: seconds that only grow.
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
        for name, value in fields.items():
            if value is None:
                self.fields.pop(name, None)
            else:
                self.fields[name] = value
        now = self.clock()
        if now - self._marks[-1][0] >= 1 or len(self._marks) == 1:
            self._marks.append((now, done))

    @property
    def elapsed(self) -> float:
        return self.clock() - self.began

    @property
    def rate(self) -> float | None:
        """Units a second. The first unit (it may compile) stops counting once it is half a minute behind."""
        time_then, done_then = self._marks[0]
        time_now, done_now = self._marks[-1]
        return (
            (done_now - done_then) / (time_now - time_then) if time_now > time_then and done_now > done_then else None
        )

    @property
    def remaining(self) -> float | None:
        """Seconds to go, if that can be known."""
        if self.total is None or self.rate is None:
            return None
        since = self.clock() - self._marks[-1][0]
        return max((self.total - self._marks[-1][1]) / self.rate - since, 0.0)

    def amount(self) -> str:
        """`120/1000`, or with bytes `1.5/4.0 MB`."""
        return formatting.progress(self.done, self.total, self.unit)

    def speed(self, average: bool = False) -> str | None:
        """The speed in units a second; None where a field tells it (tokens/s), or before anything is done."""
        if any(name.endswith("_per_second") for name in self.fields):
            return None
        rate = (self.done - self.start) / self.elapsed if average and self.elapsed > 0 else self.rate
        return formatting.rate(rate, self.unit) if rate else None


class SilentProgress:
    """A context manager around `update` that shows nothing: for processes that do not speak."""

    def update(self, done: int, **fields: Any) -> None:
        """`done`: units done in all, those before `start` too. For `fields` see `Console.progress`."""

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class PlainProgress(SilentProgress):
    """Lines for logs and pipes, each complete in itself: the start, the first update, the end, and between them one
    every `interval` seconds; after five minutes less often (a sixtieth of the time gone), at least once a minute."""

    def __init__(
        self,
        say: Callable[[str], None],
        total: int | None,
        description: str,
        unit: str,
        start: int,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._say, self._interval = say, interval
        self._count = Count(total, description, unit, start, clock)
        self._spoke, self._spoken = float("-inf"), ""

    def __enter__(self):
        self._speak()
        self._spoke = float("-inf")  # the first update is news, however soon it comes
        return self

    def update(self, done: int, **fields: Any) -> None:
        self._count.update(done, fields)
        pause = max(self._interval, min(self._count.elapsed / 60, 60.0))
        if self._count.clock() - self._spoke >= pause and done != self._count.total:  # the end is told on leaving
            self._speak()

    def __exit__(self, kind, error, trace) -> None:
        if self._count.done != self._count.start or self._count.total == self._count.start:
            self._speak(last=True)

    def _speak(self, last: bool = False) -> None:
        count = self._count
        head = count.unit if count.unit == "step" else count.description or ("" if count.unit == "B" else count.unit)
        parts = [f"{head} {count.amount()}".strip()]
        if count.unit not in ("step", "B") and count.description:
            parts[0] += f" {count.unit}s"
        parts += [formatting.metric(name, value) for name, value in count.fields.items()]
        if (speed := count.speed(average=last)) is not None:
            parts.append(speed)
        if last:
            parts.append(f"took {formatting.duration(count.elapsed)}")
        elif count.done != count.start and (remaining := count.remaining) is not None:
            parts.append(f"ETA {formatting.duration(remaining)}")
        self._spoke = count.clock()
        self._say("  ".join(parts))


def _leave_to_the_parent() -> None:
    """In a forked child (a data worker): speak past the parent's bar, whose lock its thread may hold for ever here."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


class LiveProgress(SilentProgress):
    """A bar that redraws itself four times a second, cut to the terminal's width: what matters least goes first."""

    _watching_forks = False

    def __init__(self, console: Any, total: int | None, description: str, unit: str, start: int):
        self._console, self._count = console, Count(total, description, unit, start)
        self._live: Any = None
        self._ended = False

    def __enter__(self):
        from rich.live import Live

        if not LiveProgress._watching_forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_leave_to_the_parent)
            LiveProgress._watching_forks = True
        self._live = Live(
            self,
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # never swallow a piped stdout
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

    def __rich__(self) -> Any:
        from rich.text import Text

        count, width = self._count, self._console.width - 1
        shown = [
            (formatting.metric(name, value), _IMPORTANCE.get(name, 5)) for name, value in dict(count.fields).items()
        ]
        if (speed := count.speed(average=self._ended)) is not None:
            shown.append((speed, 7.8))
        remaining = None if self._ended else count.remaining
        share = None if not count.total else min(count.done / count.total, 1.0)
        # (text, style, importance): the least important leaves first when the terminal is narrow.
        pieces = [
            (count.description, "bold", 2),
            (count.amount(), "", 9),
            *((text, "cyan" if i == 0 else "", weight - i / 100) for i, (text, weight) in enumerate(shown)),
            ("" if remaining is None else f"ETA {formatting.duration(remaining)}", "green", 7.5),
            (("took " if self._ended else "") + formatting.duration(count.elapsed), "dim", 0),
        ]
        pieces = [piece for piece in pieces if piece[0]]
        percent = "" if share is None else f"{share:4.0%}"
        room = width - len(percent) - 1
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
            line.append(percent)
            line.append("  ")
        for i, (text, style, _) in enumerate(pieces):
            line.append(("  " if i else "") + text, style)
        return line
