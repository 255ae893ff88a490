"""Defines `Heartbeat`, a thread that writes `logs/heartbeat.json` of a run every few seconds."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.files import replace_file
from weft.observe.manifest import now
from weft.observe.status import progress

HEARTBEAT = "logs/heartbeat.json"
CLOSE_SECONDS = 10.0  # the least time that the end of a run waits for the last version, if the disk is slow
log = logging.getLogger("weft.train")


class Heartbeat:
    """Writes what a run is doing, in a thread that the training never waits for.

    The file has `time` (of the file, ISO 8601), `step`, `loss`, `step_time` (when the step ended; null before the first
    one), `doing`, `status` (null while the run goes on), `host` and `pid`. It is replaced atomically. An old `time`
    shows that the process is gone; an old `step_time` shows that the run hangs.

    Args:
        run: the run directory.
        seconds: time between two versions of the file.
        read: returns `step`, `loss`, `step_time` and `status`.
    """

    def __init__(self, run: Path, seconds: float, read: Callable[[], dict[str, Any]]):
        self.path, self.seconds, self.read = run / HEARTBEAT, seconds, read
        self._ended, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread and writes the last version of the file."""
        self._ended.set()
        self._thread.join(max(self.seconds, CLOSE_SECONDS))

    def _run(self) -> None:
        while not self._ended.is_set():
            self._write()
            self._ended.wait(self.seconds)
        self._write()  # what was read for the version before may be older than the end

    def _write(self) -> None:
        beat = {"time": now(), **self.read(), "doing": progress.doing, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            replace_file(self.path, json.dumps(beat) + "\n", durable=False)
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be written: %s", self.path, error)
            self._failed = True
