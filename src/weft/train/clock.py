"""Step timing: a step lasts from its request for data to the end of its update."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weft.observe.flops import mfu


class StepClock:
    """Averages over the steps since the last line of metrics, and over the session.

    Args:
        tokens: tokens per step.
        flops_per_token: as a function of the sequence length.
        peak: FLOP/s of all devices.

    Attributes:
        step_seconds: the time of the last step.
        warmup_seconds: the time of the session's first step, which compiles and allocates.
        steady_seconds, steady_steps: the later steps.
    """

    def __init__(self, device: torch.device, tokens: int, flops_per_token: Callable[[int], float], peak: float):
        self.device, self.tokens, self.flops_per_token, self.peak = device, tokens, flops_per_token, peak
        self.warmup_seconds: float | None = None
        self.step_seconds = self.steady_seconds = 0.0
        self.steady_steps = 0
        self._began = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Starts new averages, after a line of metrics."""
        self._warmup_logged = self.warmup_seconds is not None
        self.flops = self.seconds = self.data_seconds = 0.0
        self.steps = 0

    def begin(self) -> None:
        """Starts a step."""
        self._began = time.perf_counter()

    def data_arrived(self) -> None:
        """Ends the wait for the batch."""
        self.data_seconds += time.perf_counter() - self._began

    def end(self, sequence: int) -> None:
        """Ends a step, whose sequences have `sequence` tokens."""
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
        self.flops += self.tokens * self.flops_per_token(sequence)

    def metrics(self) -> dict[str, float | None]:
        """Returns the averages since the last line."""
        tokens = self.tokens * self.steps
        speed = tokens / self.seconds
        return {
            "tokens_per_second": speed,
            "mfu": mfu(speed, self.flops / tokens, self.peak),
            "step_seconds": self.seconds / self.steps,
            "data_seconds": self.data_seconds / self.steps,
            **({} if self._warmup_logged else {"warmup_seconds": self.warmup_seconds}),
        }
