"""Cosine decay (Loshchilov & Hutter, "SGDR", 2017), without restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.optim.schedule import Schedule


@dataclass(eq=False, kw_only=True)
class Cosine(Schedule):
    """Half a cosine down to `final` (a fraction of lr)."""

    final: Annotated[float, Ge(0), Le(1)] = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * step / steps))
