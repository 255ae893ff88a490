"""Computes how many samples of each source of a mixture a run reads, from weights, limits and stages.

The result is a list of phases, each a sequence of equal blocks. `DataSection` creates stages and phases from a
configuration, `weft.data.batches.mixture_plan` summarizes phases, and `weft.data.batches.mixture` maps each sample to
its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

BLOCK = 10_000  # default of data.mixture_block: number of sequences in a block, within which shares are exact


@dataclass(frozen=True)
class Stage:
    """A stage of the data curriculum: the weight of each source during `samples` samples.

    `samples` is None if the stage lasts to the end of the run.
    """

    weights: tuple[Fraction, ...]
    samples: int | None = None


@dataclass(frozen=True)
class Phase:
    """A range of samples in which every block has the same number of samples of each source.

    Attributes:
        start, stop: range of sample indices in the run (`stop` exclusive); `stop` is None if the phase has no end.
        counts: number of samples of each source in one block. The sum of `counts`, which is the block size, divides the
            size of the range.
        before: number of samples of each source in all earlier phases.
        stage: index of the curriculum's stage to which the phase belongs.
    """

    start: int
    stop: int | None
    counts: tuple[int, ...]
    before: tuple[int, ...]
    stage: int

    @property
    def block(self) -> int:
        """The block size: number of samples in one block."""
        return sum(self.counts)


def phases(stages: Sequence[Stage], limits: Sequence[int | None], block: int = BLOCK) -> list[Phase]:
    """Returns the phases of a run. The phases do not depend on the length of the run.

    Every block contains each source's share of samples, rounded by largest remainders. A block in which a source would
    exceed its limit ends where that source is exhausted. After that, the other sources replace the exhausted source in
    proportion to their weights. The last block of a stage is truncated to the stage's length.

    Args:
        limits: maximum number of samples of each source; None for a source without a limit.
        block: number of samples in a complete block.

    Returns:
        Contiguous phases. If the last phase has a `stop`, the run cannot have more than `stop` samples, because the
        sources with a weight above 0 have then reached their limits.
    """
    result: list[Phase] = []
    used = [0] * len(limits)
    at = 0
    for number, stage in enumerate(stages):
        end = None if stage.samples is None else at + stage.samples
        while end is None or at < end:
            left = [None if limit is None else limit - taken for limit, taken in zip(limits, used, strict=True)]
            counts = _block_counts(block if end is None else min(block, end - at), stage.weights, left)
            size = sum(counts)
            if size == 0:
                return result
            repeats = [most // count for most, count in zip(left, counts, strict=True) if most is not None and count]
            if end is not None:
                repeats.append((end - at) // size)
            stop = at + min(repeats) * size if repeats else None
            result.append(Phase(at, stop, tuple(counts), tuple(used), number))
            if stop is None:
                return result
            used = [taken + (stop - at) // size * count for taken, count in zip(used, counts, strict=True)]
            at = stop
    return result


def _block_counts(size: int, weights: Sequence[Fraction], left: Sequence[int | None]) -> list[int]:
    """Returns the number of samples of each source in a block of `size` samples.

    If a source has too few samples left, the block is shorter: it ends where the first source is exhausted, so the
    weights hold as long as possible.

    Args:
        left: number of samples that each source has left; None for a source without a limit.
    """
    weights = [Fraction(0) if most == 0 else weight for weight, most in zip(weights, left, strict=True)]
    total = sum(weights)
    if total == 0:
        return [0] * len(weights)
    counts = largest_remainders(size, weights)
    if all(most is None or count <= most for count, most in zip(counts, left, strict=True)):
        return counts
    pairs = enumerate(zip(weights, left, strict=True))
    sizes = [(int(most * total / weight), i) for i, (weight, most) in pairs if weight and most]
    size, first = min(sizes)
    remaining = left[first] or 0
    rest = [Fraction(0) if i == first else weight for i, weight in enumerate(weights)]
    # The other sources get at most their share of `size`, and so at most what they have left.
    counts = largest_remainders(size - remaining, rest) if any(rest) else [0] * len(weights)
    counts[first] = remaining
    return counts


def largest_remainders(size: int, weights: Sequence[Fraction | int]) -> list[int]:
    """Splits `size` into integers in proportion to `weights`.

    Rounds each quota down, then adds 1 to the quotas with the largest remainders until the sum is `size`.
    """
    total = sum(weights)
    quotas = [Fraction(size) * weight / total for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts


def decimal_fraction(number: float) -> Fraction:
    """Returns the exact fraction of the number's decimal notation: 0.7 becomes 7/10."""
    return Fraction(repr(number))


def temperature_weights(sizes: Sequence[int], temperature: float) -> tuple[Fraction, ...]:
    """Returns a weight for each source, proportional to size^(1 / temperature).

    A temperature of 1 gives weights proportional to the sizes; a high temperature gives nearly equal weights.
    """
    largest = max(sizes)
    return tuple(decimal_fraction(round((size / largest) ** (1 / temperature), 15)) for size in sizes)


def find_empty_share(stages: Sequence[Stage], block: int) -> tuple[int, int, str] | None:
    """Finds a source whose weight is above 0 but too small for a sample in each block.

    Returns:
        Index of the stage, index of the source, and the error message without its beginning "<source> has";
        None if there is no such source.
    """
    for number, stage in enumerate(stages):
        counts = largest_remainders(block, stage.weights)
        for source, (weight, count) in enumerate(zip(stage.weights, counts, strict=True)):
            if weight > 0 and count == 0:
                share = weight / sum(stage.weights)  # a fraction: as a float, it can be too small to divide by
                problem = f"a share of {float(share):.2g}, less than 1 sequence in each block of {block:,} sequences"
                remedy = f"raise its weight, or set data.mixture_block above {int(1 / share):,}"
                return number, source, f"{problem}; {remedy}"
    return None


def shortfall(run_phases: Sequence[Phase], samples: int, length: int) -> str | None:
    """Returns an error message if a run of `samples` samples needs more than the sources' limits allow; else None.

    Args:
        length: number of tokens per sample.
    """
    end = run_phases[-1].stop if run_phases else 0
    if end is None or samples <= end:
        return None
    return (
        f"the run needs {samples * length:,} tokens, but max_epochs limits the sources to {end * length:,} tokens; "
        "raise max_epochs, shorten the run or add data"
    )
