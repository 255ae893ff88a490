"""Loss scaling (Micikevicius et al., 2018): gradients that float16 is too narrow for are moved into its range."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weft.config.training import TrainingSection
from weft.parallel.local_parameters import local

INITIAL, WINDOW = 65536.0, 2000  # those of torch.amp.GradScaler, as are doubling and halving
FLOOR = 1.0  # below it gradients would be made smaller than they are


class LossScale:
    """The factor on the loss: doubled after so many updates in a row, halved where a gradient overflows.

    Whether one did is seen in the norm of the whole gradient, which all ranks know: they agree without being asked.

    Args:
        training: where nothing is computed or summed in float16, the factor stays 1.
        state: of a checkpoint: goes on from the factor in it, if it has one.

    Attributes:
        factor: by which the loss is to be multiplied before backward.
        window: updates in a row after which it is doubled.
        row: updates since it last changed.
        skipped: updates of this run that were not made.
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
        """Divide the gradients by the factor: to the bit where it is a power of two."""
        if self.factor == 1.0:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            local(gradient).mul_(1.0 / self.factor)

    def may_skip(self) -> bool:
        """Whether an overflow is a reason to try with a smaller factor, and not to give up."""
        return self.scales and self.factor > FLOOR

    def update(self, finite: bool) -> None:
        """Move the factor after a step; one that was not finite has been skipped."""
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
        """What a step's line of metrics has of it; one that is not finite is the next that is skipped."""
        return {"loss_scale": self.factor, "skipped": self.skipped + (not finite)} if self.scales else {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it, as JSON."""
        return {"loss_scale": {"factor": self.factor, "row": self.row, "skipped": self.skipped}} if self.scales else {}
