"""The tracker for TensorBoard, with event files in `<run>/tensorboard`. To view: `tensorboard --logdir runs`."""

from __future__ import annotations

import time
from typing import Any

from weft.errors import UserError
from weft.observe.run_info import RunInfo, scalars


class TensorBoard:
    """Writes scalars (train/loss, validation/loss, speed/mfu, ...) and sampled text.

    A resumed run purges the logged steps that it repeats.

    Args:
        flush_seconds: maximum number of seconds between flushes to disk.
    """

    def __init__(self, run: RunInfo, *, flush_seconds: float = 2.0):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"log.trackers: cannot import tensorboard ({error}); pip install tensorboard") from error
        self._every, self._flushed = flush_seconds, time.monotonic()
        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=(run.resumed_step or 0) + 1)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes the metrics of one step."""
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text under `samples/<name>`, indented because TensorBoard renders Markdown."""
        self._writer.add_text(f"samples/{name}", "\n".join("    " + line for line in text.split("\n")), step)
        self._flush()

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()

    def _flush(self) -> None:
        if time.monotonic() - self._flushed >= self._every:
            self._writer.flush()
            self._flushed = time.monotonic()
