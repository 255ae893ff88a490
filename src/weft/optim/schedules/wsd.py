"""Warm-up, stable, decay (Hu et al., "MiniCPM", 2024; Hägele et al., "Scaling Laws Beyond Fixed Durations", 2024)."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le

from weft.optim.schedule import Schedule


class WarmupStableDecay(Schedule):
    """Full learning rate, then over the last `decay_fraction` of the run down to `final` (a share of lr).

    `shape` is that of the decay; "sqrt" is `1 - sqrt(progress)`, the best of Hägele et al. However short the run, at
    least its last step is lowered, unless `decay_fraction` is 0.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        warmup_steps: Annotated[int, Ge(0)] | None = None,
        warmup_fraction: Annotated[float, Ge(0), Le(1)] | None = None,
        decay_fraction: Annotated[float, Ge(0), Le(1)] = 0.2,
        final: Annotated[float, Ge(0), Le(1)] = 0.0,
        shape: Literal["linear", "sqrt"] = "linear",
    ):
        super().__init__(total_steps, warmup_steps, warmup_fraction)
        # The first step of the decay is still at full rate: with fewer than two there would be none.
        self.decay_steps = max(2, round(decay_fraction * total_steps)) if decay_fraction else 0
        self.final, self.shape = final, shape

    def after_warmup(self, step: int, steps: int) -> float:
        into_decay = step - (steps - min(self.decay_steps, steps))
        if into_decay < 0:
            return 1.0
        progress = into_decay / max(1, min(self.decay_steps, steps))
        down = progress if self.shape == "linear" else progress**0.5
        return 1 - (1 - self.final) * down
