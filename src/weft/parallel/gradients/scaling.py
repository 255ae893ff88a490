"""Dynamic loss scaling for float16 (Micikevicius et al., 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weft.config.training import TrainingSection
from weft.parallel.local_parameters import local

INITIAL, WINDOW = 65536.0, 2000  # those of torch.amp.GradScaler, as are doubling and halving
FLOOR = 1.0  # a lower scale would make gradients smaller


class LossScale:
    """The loss scale: doubled after `window` updates in a row, halved if a gradient overflows.

    An overflow is detected in the global gradient norm, so all ranks agree without communication.

    Args:
        training: without float16 the scale stays 1.
        state: of a checkpoint, to resume from.

    Attributes:
        factor: the scale.
        window: updates in a row after which it is doubled.
        row: updates since it last changed.
        skipped: skipped updates of this run.
    """

    def __init__(self, training: TrainingSection, state: dict[str, Any] | None = None):
        self.scales = "float16" in (training.dtype, training.reduce_dtype)
        self.factor = (training.initial_loss_scale or INITIAL) if self.scales else 1.0
        self.window = training.loss_scale_window or WINDOW
        self.row = self.skipped = 0
        if self.scales and (saved := (state or {}).get("loss_scale")) is not None:
            self.factor, self.row, self.skipped = saved["factor"], saved["row"], saved["skipped"]

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divides gradients by the scale, exactly if it is a power of two."""
        if self.factor == 1.0:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(1.0 / self.factor)

    def may_skip(self) -> bool:
        """Whether to skip an update that overflows and retry with a smaller scale, rather than fail."""
        return self.scales and self.factor > FLOOR

    def update(self, finite: bool) -> None:
        """Adapts the scale after a step; one with a non-finite gradient was skipped."""
        if not self.scales:
            return
        if not finite:
            self.factor, self.row = max(FLOOR, self.factor / 2), 0
            self.skipped += 1
        elif self.row + 1 == self.window and math.isfinite(self.factor * 2):
            self.factor, self.row = self.factor * 2, 0
        else:
            self.row += 1

    def metrics(self, finite: bool) -> dict[str, float]:
        """A step's `loss_scale` and `skipped`, including this step if it is not finite; {} without float16."""
        return {"loss_scale": self.factor, "skipped": self.skipped + (not finite)} if self.scales else {}

    def state(self) -> dict[str, Any]:
        """The JSON state for a checkpoint."""
        return {"loss_scale": {"factor": self.factor, "row": self.row, "skipped": self.skipped}} if self.scales else {}
