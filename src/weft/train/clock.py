"""Defines `StepClock`, which times steps. A step lasts from the request for the batch to the end of the update."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from weft.observe.flops import mfu


class StepClock:
    """Times the steps. Averages speed and times over the steps since the last call of `reset`.

    Args:
        flops_per_token: function that returns the FLOPs per token for a sequence length.
        peak: peak FLOP/s, summed over all devices.

    Attributes:
        began: when the last step began (`time.perf_counter`).
        step_seconds: duration of the last step.
        waited_seconds: the part of it before its batch arrived.
        warmup_seconds: duration of the session's first step, which compiles and allocates; None until it has ended.
        steady_seconds: total duration of the later steps.
        steady_steps: number of later steps.
        steady_tokens: number of tokens of the later steps.
    """

    def __init__(self, device: torch.device, flops_per_token: Callable[[int], float], peak: float):
        self.device, self.flops_per_token, self.peak = device, flops_per_token, peak
        self.warmup_seconds: float | None = None
        self.step_seconds = self.waited_seconds = self.steady_seconds = 0.0
        self.steady_steps = self.steady_tokens = 0
        self.began = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Starts new averages. Called after each line of metrics is written."""
        self._warmup_logged = self.warmup_seconds is not None
        self.flops = self.seconds = self.data_seconds = 0.0
        self.steps = self.tokens = 0

    def begin(self) -> None:
        """Starts the timer of a step."""
        self.began = time.perf_counter()

    def data_arrived(self) -> None:
        """Records that the step's batch has arrived; the time since `begin` counts as waiting for data."""
        self.waited_seconds = time.perf_counter() - self.began
        self.data_seconds += self.waited_seconds

    def end(self, tokens: int, sequence: int, *, wait: bool) -> None:
        """Ends the timer of a step with `tokens` tokens, in sequences of `sequence` tokens.

        Args:
            wait: whether to wait for the device. If not, the time of the update counts for the next step. The first
                step always waits.
        """
        if self.device.type == "cuda" and (wait or self.warmup_seconds is None):
            torch.cuda.synchronize()
        self.step_seconds = seconds = time.perf_counter() - self.began
        self.seconds += seconds
        self.steps += 1
        if self.warmup_seconds is None:
            self.warmup_seconds = seconds
        else:
            self.steady_seconds += seconds
            self.steady_steps += 1
            self.steady_tokens += tokens
        self.tokens += tokens
        self.flops += tokens * self.flops_per_token(sequence)

    def metrics(self) -> dict[str, float | None]:
        """Returns metric name -> mean speed or time of the steps since the last call of `reset`."""
        speed = self.tokens / self.seconds
        return {
            "tokens_per_second": speed,
            "mfu": mfu(speed, self.flops / max(1, self.tokens), self.peak),
            "step_seconds": self.seconds / self.steps,
            "data_seconds": self.data_seconds / self.steps,
            **({} if self._warmup_logged else {"warmup_seconds": self.warmup_seconds}),
        }
