"""The WSD schedule: warm-up, stable, decay.

Hu et al., "MiniCPM", 2024; Hägele et al., "Scaling Laws Beyond Fixed Durations", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class WarmupStableDecay(Schedule):
    """After the warm-up, the learning rate stays constant, then decays over the last steps of the run.

    With `decay_fraction` 0 there is no decay. Otherwise the decay takes at least two steps, and at most all steps after
    the warm-up. The first step of the decay still has the full learning rate.

    Args:
        warmup_steps: number of steps over which the learning rate rises linearly to `optimizer.lr`; default: 0.
        warmup_fraction: `warmup_steps` as a fraction of the run's steps. Set `warmup_steps` or `warmup_fraction`, not
            both.
        decay_fraction: length of the decay, as a fraction of the run's steps.
        final: learning rate at the end of the run, as a fraction of `optimizer.lr`.
        shape: form of the decay. The learning rate is `optimizer.lr` times `1 - (1 - final) * progress` (linear) or
            times `1 - (1 - final) * sqrt(progress)` (sqrt, the best form in Hägele et al., 2024), where `progress`
            rises from 0 to 1 during the decay.
    """

    decay_fraction: Annotated[float, Ge(0), Le(1)] = 0.2
    final: Annotated[float, Ge(0), Le(1)] = 0.0
    shape: Literal["linear", "sqrt"] = "linear"

    def after_warmup(self, step: int, steps: int) -> float:
        decay_steps = 0
        if self.decay_fraction:  # at least 2: the first step of the decay still has the full learning rate
            decay_steps = min(max(2, round(self.decay_fraction * self.total_steps)), steps)
        progress = max(0, step - (steps - decay_steps)) / max(1, decay_steps)
        down = progress if self.shape == "linear" else progress**0.5
        return 1 - (1 - self.final) * down
