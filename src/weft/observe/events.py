"""Writes and reads `logs/events.jsonl` of a run: findings of the watch, one JSON object per line.

Each line has `time` (ISO 8601), `step` (counted from 1), `event` (the kind, such as "spike"), `action` (what Weft did)
and `text`, then the values of the event. Lines are never removed: after a rollback, the file still shows the steps that
the run repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.files import report_write_errors
from weft.observe.manifest import now
from weft.observe.metrics import encode, read_lines

EVENTS = "logs/events.jsonl"


def append_event(run_directory: Path, step: int, event: str, action: str, text: str, **values: Any) -> dict[str, Any]:
    """Appends an event to the file, in one write, and returns the record.

    Raises:
        UserError: the disk is full, or the file cannot be written.
    """
    path = run_directory / EVENTS
    record = {"time": now(), "step": step, "event": event, "action": action, "text": text, **values}
    with report_write_errors(path, "correct the cause, then run the same command to resume"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(encode(record))
    return record


def read_events(run_directory: str | Path) -> list[dict[str, Any]]:
    """Returns the events of a run in the order written; an empty list without events. Raises as `read_lines`."""
    return read_lines(Path(run_directory) / EVENTS)
