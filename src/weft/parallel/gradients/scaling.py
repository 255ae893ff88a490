"""Defines dynamic loss scaling for float16 (Micikevicius et al., 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weft.config.training import TrainingSection
from weft.parallel.local_parameters import local

INITIAL, WINDOW = 65536.0, 2000  # same values as torch.amp.GradScaler, which also doubles and halves the scale
FLOOR = 1.0  # smallest scale: below 1, gradients would be smaller than without scaling


class LossScale:
    """The loss scale: doubled after `window` updates without overflow, halved if a gradient overflows.

    An overflow is detected in the global gradient norm, which is the same on all ranks, so no communication is needed.

    Args:
        training: the `training` section. Without float16, the scale is always 1.
        state: saved state of a checkpoint, to resume from.

    Attributes:
        factor: the current scale.
        window: number of updates without overflow after which the scale is doubled.
        row: number of consecutive updates without overflow since the scale last changed.
        skipped: number of updates of this run that were skipped because of an overflow.
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
        """Divides gradients by the scale. The division is exact if the scale is a power of two."""
        if self.factor == 1.0:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).mul_(1.0 / self.factor)

    def may_skip(self) -> bool:
        """Whether a step whose gradient norm is not finite skips its update. If False, such a step ends the run."""
        return self.scales and self.factor > FLOOR

    def update(self, finite: bool) -> None:
        """Adapts the scale after a step.

        Args:
            finite: whether the gradient norm was finite; if not, the update was skipped.
        """
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
        """Returns the metrics `loss_scale` and `skipped` of a step; {} without float16. Call it before `update`."""
        return {"loss_scale": self.factor, "skipped": self.skipped + (not finite)} if self.scales else {}

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON values; {} without float16."""
        return {"loss_scale": {"factor": self.factor, "row": self.row, "skipped": self.skipped}} if self.scales else {}
