"""Warm-up, stable, decay (Hu et al., "MiniCPM", 2024; Hägele et al., "Scaling Laws Beyond Fixed Durations", 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class WarmupStableDecay(Schedule):
    """Full learning rate, then a decay over the last `decay_fraction` of the run to `final` (a fraction of lr).

    `shape` is the form of the decay; "sqrt" is `1 - sqrt(progress)`, the best one in Hägele et al. At least the last
    step is decayed, however short the run, unless `decay_fraction` is 0.
    """

    decay_fraction: Annotated[float, Ge(0), Le(1)] = 0.2
    final: Annotated[float, Ge(0), Le(1)] = 0.0
    shape: Literal["linear", "sqrt"] = "linear"

    def after_warmup(self, step: int, steps: int) -> float:
        decay_steps = 0
        if self.decay_fraction:  # at least 2: the decay's first step is still at full rate
            decay_steps = min(max(2, round(self.decay_fraction * self.total_steps)), steps)
        progress = max(0, step - (steps - decay_steps)) / max(1, decay_steps)
        down = progress if self.shape == "linear" else progress**0.5
        return 1 - (1 - self.final) * down
