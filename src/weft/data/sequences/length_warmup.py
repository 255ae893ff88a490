"""Sequence-length warm-up: begins with short sequences, for a more stable start at high learning rates.

Li, Zhang & He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models", 2022.
"""

from __future__ import annotations

from weft.errors import UserError


class LengthWarmup:
    """The sequence length of each step, `length(step)`, which grows to `sequence_length` in stages.

    The target length grows linearly over the first `steps` steps, as in the paper. A step has the longest stage that is
    not above the target. Full sequences are split into sequences of that length (`Batch.split_sequences`), so a step
    keeps its tokens.

    Args:
        sequence_length: of the full sequences.
        start: minimum length of the first stage.
        steps: the first step (counted from 0) with full sequences.

    Attributes:
        stages: ascending lengths, each a divisor of the next; the last is `sequence_length`. For a power of two, each
            is twice the previous one.

    Raises:
        UserError: `start` or `steps` out of range, or no stage below `sequence_length`.
    """

    def __init__(self, sequence_length: int, start: int, steps: int):
        if not 1 <= start <= sequence_length:
            raise UserError(
                f"data.length_warmup.start: {start} is not between 1 and the sequence length, {sequence_length}; "
                "set it lower"
            )
        if steps < 0:
            raise UserError(f"data.length_warmup.steps: {steps} is negative; set the number of steps of the warm-up")
        stages = [sequence_length]
        while (shorter := stages[0] // _smallest_factor(stages[0])) >= start and shorter < stages[0]:
            stages.insert(0, shorter)
        if len(stages) == 1 and start < sequence_length:
            raise UserError(
                f"data.length_warmup.start: no length from {start} on divides the sequence length, {sequence_length}; "
                "set it lower, or data.sequence_length to a power of two"
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
