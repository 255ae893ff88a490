"""The time that steps take: from before a step asks for its data to after its update."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weft.observe.flops import mfu


class StepClock:
    """Averages over the steps since the last line of metrics, and over a session.

    Args:
        tokens: of each step.
        flops_of_row: of a token, as a function of how many are in its row.
        peak: FLOP/s of all devices.

    Attributes:
        step_seconds: of the last step.
        warmup_seconds: of the session's first step, which compiles and takes its first memory.
        steady_seconds, steady_steps: of those after it.
    """

    def __init__(self, device: torch.device, tokens: int, flops_of_row: Callable[[int], float], peak: float):
        self.device, self.tokens, self.flops_of_row, self.peak = device, tokens, flops_of_row, peak
        self.warmup_seconds: float | None = None
        self.step_seconds = 0.0
        self.steady_seconds, self.steady_steps, self._told_warmup = 0.0, 0, False
        self._began = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """A line of metrics was written: averages begin anew."""
        self._told_warmup = self.warmup_seconds is not None
        self.flops = self.seconds = self.data_seconds = 0.0
        self.steps = 0

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def data_arrived(self) -> None:
        """The batch is here."""
        self.data_seconds += time.perf_counter() - self._began

    def end(self, row: int) -> None:
        """The update is made; rows had so many tokens."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.step_seconds = seconds = time.perf_counter() - self._began
        self.seconds += seconds
        self.steps += 1
        if self.warmup_seconds is None:
            self.warmup_seconds = seconds
        else:
            self.steady_seconds += seconds
            self.steady_steps += 1
        self.flops += self.tokens * self.flops_of_row(row)

    def metrics(self) -> dict[str, float | None]:
        """Speeds since the last line."""
        tokens = self.tokens * self.steps
        speed = tokens / self.seconds
        return {
            "tokens_per_second": speed,
            "mfu": mfu(speed, self.flops / tokens, self.peak),
            "step_seconds": self.seconds / self.steps,
            "data_seconds": self.data_seconds / self.steps,
            **({} if self._told_warmup else {"warmup_seconds": self.warmup_seconds}),
        }
