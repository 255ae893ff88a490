"""Sequence-length warm-up: training begins with short sequences, which is more stable at high learning rates.

Li, Zhang & He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models", 2022.
"""

from __future__ import annotations


class LengthWarmup:
    """A schedule of the sequence length: `length(step)` grows to `sequence_length` in stages.

    A target length grows linearly over the first `steps` steps, as in Li, Zhang & He (2022). The length of a step is
    the target, rounded down to a length in `stages`. Full sequences are split into sequences of this length
    (`Batch.split_sequences`), so the number of tokens per step does not change.

    Args:
        sequence_length: number of tokens of full sequences.
        start: length of the first stage: `sequence_length` divided by a power of two.
        steps: number of steps of the warm-up. Step `steps` (counted from 0) is the first one with full sequences.

    Attributes:
        stages: the lengths `start`, `2 * start`, `4 * start`, ... up to `sequence_length`.
    """

    def __init__(self, sequence_length: int, start: int, steps: int):
        self.sequence_length, self.start, self.steps = sequence_length, start, steps
        self.stages = [start << doublings for doublings in range((sequence_length // start).bit_length())]

    def length(self, step: int) -> int:
        """Returns the sequence length of `step`, counted from 0; a divisor of `sequence_length`."""
        if step >= self.steps:
            return self.sequence_length
        target = self.start + (self.sequence_length - self.start) * step // self.steps
        return max(stage for stage in self.stages if stage <= target)
