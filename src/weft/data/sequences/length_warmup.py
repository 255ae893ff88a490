"""Sequence-length warm-up: training begins with short sequences, which is more stable at high learning rates.

Li, Zhang & He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models", 2022.
"""

from __future__ import annotations

from weft.errors import UserError


class LengthWarmup:
    """A schedule of the sequence length: `length(step)` grows to `sequence_length` in stages.

    A target length grows linearly over the first `steps` steps, as in Li, Zhang & He (2022). The length of a step is
    the target, rounded down to a length in `stages`. Full sequences are split into sequences of this length
    (`Batch.split_sequences`), so the number of tokens per step does not change.

    Args:
        sequence_length: number of tokens of full sequences.
        start: minimum length of the first stage.
        steps: number of steps of the warm-up. Step `steps` (counted from 0) is the first one with full sequences.

    Attributes:
        stages: ascending lengths; each length divides the next, and the last is `sequence_length`. If `sequence_length`
            is a power of two, each length is twice the previous length.

    Raises:
        UserError: `start` or `steps` is out of range, or no length from `start` to `sequence_length - 1` divides
            `sequence_length`.
    """

    def __init__(self, sequence_length: int, start: int, steps: int):
        if not 1 <= start <= sequence_length:
            raise UserError(
                f"data.length_warmup.start: {start} is not between 1 and data.sequence_length ({sequence_length}); "
                "set a number in this range"
            )
        if steps < 0:
            raise UserError(f"data.length_warmup.steps: {steps} is negative; set 1 or more steps")
        stages = [sequence_length]
        while (shorter := stages[0] // _smallest_factor(stages[0])) >= start and shorter < stages[0]:
            stages.insert(0, shorter)
        if len(stages) == 1 and start < sequence_length:
            raise UserError(
                f"data.length_warmup.start: no length from {start} to {sequence_length - 1} divides "
                f"data.sequence_length ({sequence_length}); "
                "lower the start, or set data.sequence_length to a power of two"
            )
        self.sequence_length, self.start, self.steps, self.stages = sequence_length, start, steps, stages

    def length(self, step: int) -> int:
        """Returns the sequence length of `step`, counted from 0; a divisor of `sequence_length`."""
        if step >= self.steps:
            return self.sequence_length
        first = self.stages[0]
        target = first + (self.sequence_length - first) * step // self.steps
        return max(stage for stage in self.stages if stage <= target)


def _smallest_factor(number: int) -> int:
    return next((f for f in range(2, int(number**0.5) + 1) if number % f == 0), number)
