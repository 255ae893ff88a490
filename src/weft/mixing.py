"""How several sources share a run: weights, limits and stages, worked out as phases of equal blocks.

Numbers alone: what a config says of them is `DataSection`'s to tell, which gives its stages and phases.
`weft.data.batches.mixture_plan` sums them up for people; `weft.data.batches.mixture` follows them, sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

BLOCK = 10_000  # sequences over which shares are exact, if data.mixture_block is not set


@dataclass(frozen=True)
class Stage:
    """Weights that hold for some samples; `samples` is None for a stage that never ends."""

    weights: tuple[Fraction, ...]
    samples: int | None = None


@dataclass(frozen=True)
class Phase:
    """A stretch of samples in which every block holds the same number of each source's.

    Attributes:
        start, stop: sample numbers of the run; `stop` is None where it never ends.
        counts: each source's samples in one block; their sum is the block's size, which divides the stretch.
        before: each source's samples in all phases before this one.
        stage: of the curriculum, from 0.
    """

    start: int
    stop: int | None
    counts: tuple[int, ...]
    before: tuple[int, ...]
    stage: int

    @property
    def block(self) -> int:
        """Samples in one block."""
        return sum(self.counts)


def phases(stages: Sequence[Stage], limits: Sequence[int | None], block: int = BLOCK) -> list[Phase]:
    """The phases of a run, from its first sample on; they do not depend on how long the run is.

    Every block holds each source's largest-remainder share. A block in which a source would pass its limit is cut short
    where that source is used up; from then on the others share its place in proportion to their weights. The last block
    of a stage is as short as the stage's length makes it.

    Args:
        limits: the most samples to take of each source; None: no limit.

    Returns:
        Phases without gaps. If the last one has a `stop`, all sources that its stage (or the next) has are used up.
    """
    found: list[Phase] = []
    used = [0] * len(limits)
    at = 0
    for number, stage in enumerate(stages):
        end = None if stage.samples is None else at + stage.samples
        while end is None or at < end:
            left = [None if limit is None else limit - taken for limit, taken in zip(limits, used, strict=True)]
            counts = one_block(block if end is None else min(block, end - at), stage.weights, left)
            size = sum(counts)
            if size == 0:
                return found
            repeats = [most // count for most, count in zip(left, counts, strict=True) if most is not None and count]
            if end is not None:
                repeats.append((end - at) // size)
            stop = at + min(repeats) * size if repeats else None
            found.append(Phase(at, stop, tuple(counts), tuple(used), number))
            if stop is None:
                return found
            used = [taken + (stop - at) // size * count for taken, count in zip(used, counts, strict=True)]
            at = stop
    return found


def one_block(size: int, weights: Sequence[Fraction], left: Sequence[int | None]) -> list[int]:
    """Each source's samples in a block of `size`; in a shorter one if a source has less left than its share.

    The shorter block ends where the first such source is used up, so that weights hold as long as they can.
    """
    weights = [Fraction(0) if most == 0 else weight for weight, most in zip(weights, left, strict=True)]
    total = sum(weights)
    if total == 0:
        return [0] * len(weights)
    counts = largest_remainders(size, weights)
    if all(most is None or count <= most for count, most in zip(counts, left, strict=True)):
        return counts
    pairs = enumerate(zip(weights, left, strict=True))
    lasting = [(int(most * total / weight), i) for i, (weight, most) in pairs if weight and most]
    size, first = min(lasting)
    spent = left[first] or 0
    rest = [Fraction(0) if i == first else weight for i, weight in enumerate(weights)]
    # What the others get is no more than their share of `size`, and so no more than they have left.
    counts = largest_remainders(size - spent, rest) if any(rest) else [0] * len(weights)
    counts[first] = spent
    return counts


def largest_remainders(size: int, weights: Sequence[Fraction | int]) -> list[int]:
    """`size` in proportion to `weights`: rounded down, the rest to the largest fractions (of equals, the first)."""
    total = sum(weights)
    quotas = [Fraction(size) * weight / total for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(weights)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_fraction[: size - sum(counts)]:
        counts[i] += 1
    return counts


def as_written(weight: float) -> Fraction:
    """A number as it was written: 0.7 is seven tenths."""
    return Fraction(repr(weight))


def from_sizes(sizes: Sequence[int], temperature: float) -> tuple[Fraction, ...]:
    """Weights proportional to size^(1 / temperature): 1 is by size, a high temperature makes all alike."""
    largest = max(sizes)
    return tuple(Fraction(repr(round((size / largest) ** (1 / temperature), 15))) for size in sizes)


def unheard(stages: Sequence[Stage], block: int) -> tuple[int, int, str] | None:
    """A stage, a source of it and what to say, where its share is less than one sample of a block; None if none is."""
    for number, stage in enumerate(stages):
        counts = largest_remainders(block, stage.weights)
        for place, (weight, count) in enumerate(zip(stage.weights, counts, strict=True)):
            if weight > 0 and count == 0:
                share = float(weight / sum(stage.weights))
                what = f"a share of {share:.2g}, less than one of the {block:,} sequences over which shares are exact"
                return number, place, f"{what}; raise its weight, or data.mixture_block above {int(1 / share):,}"
    return None


def shortfall(found: Sequence[Phase], samples: int, length: int) -> str | None:
    """What to say if the sources cannot give a run of so many samples under their limits; None if they can."""
    end = found[-1].stop if found else 0
    if end is None or samples <= end:
        return None
    return (
        f"the run has {samples * length:,} tokens, but max_epochs lets the sources give {end * length:,}; "
        "raise max_epochs, shorten the run or add data"
    )
