"""TensorBoard: event files in `<run>/tensorboard`; look with `tensorboard --logdir runs`."""

from __future__ import annotations

import time
from typing import Any

from weft.errors import UserError
from weft.observe.run_info import RunInfo, scalars


class TensorBoard:
    """Writes scalars (train/loss, validation/loss, speed/mfu, ...) and sampled text.

    A resumed run hides what was written of the steps that it makes again, so that no step stands twice.

    Args:
        run: the run; its name is the folder's above.
        flush_seconds: how old what is on disk may be.
    """

    def __init__(self, run: RunInfo, *, flush_seconds: float = 2.0):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"log.trackers: no tensorboard here ({error}); pip install tensorboard") from error
        self._every, self._flushed = flush_seconds, time.monotonic()
        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=(run.resumed_step or 0) + 1)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Note the numbers of one step."""
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Note a text under `samples/<name>`, shown as it is (indented: TensorBoard reads Markdown)."""
        self._writer.add_text(f"samples/{name}", "\n".join("    " + line for line in text.split("\n")), step)
        self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _flush(self) -> None:
        if time.monotonic() - self._flushed >= self._every:
            self._writer.flush()
            self._flushed = time.monotonic()
