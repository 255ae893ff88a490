"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Truncates text before the first stop string. The text arrives in pieces.

    The longest suffix that can be the beginning of a stop string is held back until more text arrives.

    Args:
        stops: the stop strings; none can be empty.

    Attributes:
        found: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops, self.found = stops, None
        self._held = ""

    def feed(self, text: str) -> str:
        """Appends text. Returns the next text that is not part of a stop string, and sets `found` at a stop string."""
        if not self.stops:
            return text
        held = self._held + text
        hits = [(held.find(stop), -len(stop), stop) for stop in self.stops if stop in held]
        if hits:
            at, _, self.found = min(hits)
            self._held = ""
            return held[:at]
        longest = max(
            next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:n])), 0)
            for stop in self.stops
        )
        self._held = held[len(held) - longest :]
        return held[: len(held) - longest]

    def flush(self) -> str:
        """Returns the text that was held back."""
        held, self._held = self._held, ""
        return held
