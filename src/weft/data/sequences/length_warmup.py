"""Sequence-length warm-up: short rows first, for a steadier start at high learning rates.

Li, Zhang & He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models", 2022.
"""

from __future__ import annotations

from weft.errors import UserError


class LengthWarmup:
    """How long the rows of each step are: `length(step)`, which grows to `sequence_length` in stages.

    The length aimed at grows linearly over the first `steps` steps, as in the paper; the stage is the longest that is
    not above it. Full sequences are cut into rows of that length (`Batch.cut`), so a step keeps its tokens.

    Args:
        sequence_length: of the full sequences.
        start: the first stage is the shortest of at least so many tokens.
        steps: from this step on (counted from 0) rows are full.

    Attributes:
        stages: the lengths, ascending; each divides the next, the last is `sequence_length`. For a power of two they
            double.

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
            raise UserError(f"data.length_warmup.steps: {steps} is negative; set how many steps the warm-up takes")
        stages = [sequence_length]
        while (shorter := stages[0] // _smallest_factor(stages[0])) >= start and shorter < stages[0]:
            stages.insert(0, shorter)
        if len(stages) == 1 and start < sequence_length:
            raise UserError(
                f"data.length_warmup.start: no length from {start} up divides the sequence length, {sequence_length}; "
                "set it lower, or data.sequence_length to a power of two"
            )
        self.sequence_length, self.start, self.steps, self.stages = sequence_length, start, steps, stages

    def length(self, step: int) -> int:
        """Tokens a row in `step`, counted from 0; a divisor of `sequence_length`."""
        if step >= self.steps:
            return self.sequence_length
        first = self.stages[0]
        aimed = first + (self.sequence_length - first) * step // self.steps
        return max(stage for stage in self.stages if stage <= aimed)


def _smallest_factor(number: int) -> int:
    return next((f for f in range(2, int(number**0.5) + 1) if number % f == 0), number)
