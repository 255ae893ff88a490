"""How several sources share a run: weights, limits and stages, worked out as phases of equal blocks.

No numpy here: `weft config check` shows the plan. `weft.data.batches.mixture` follows it, sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from weft.config.data import DataSection, DatasetSource, StoreSource

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


# ---- from the section


def as_written(weight: float) -> Fraction:
    """A number as it was written: 0.7 is seven tenths."""
    return Fraction(repr(weight))


def sources_of(data: DataSection) -> list[StoreSource | DatasetSource]:
    """`data.train` as a list of sources; empty if it is one store or dataset."""
    return list(data.train) if isinstance(data.train, list) else []


def weighted(data: DataSection) -> bool:
    """Whether the sources have shares of their own. If not, they are read as one: each sequence once an epoch."""
    sources = sources_of(data)
    return bool(sources) and bool(
        data.curriculum
        or data.temperature not in (None, 1.0)
        or any(s.weight is not None or s.max_epochs is not None for s in sources)
    )


def stages_of(data: DataSection, sizes: Sequence[int], length: int) -> list[Stage]:
    """The stages of a weighted mixture.

    Args:
        sizes: sequences of each source, of which weights are made where none are given (Conneau & Lample, 2019,
            "Cross-lingual Language Model Pretraining", for the temperature).
        length: tokens per sequence; a stage's tokens are rounded up to whole sequences.
    """
    sources = sources_of(data)
    if data.curriculum:
        names = [source.label for source in sources]
        stages = []
        for number, stage in enumerate(data.curriculum):
            last = number == len(data.curriculum) - 1
            samples = None if last or stage.tokens is None else -(-stage.tokens // length)
            stages.append(Stage(tuple(as_written(stage.weights.get(name, 0.0)) for name in names), samples))
        return stages
    if all(source.weight is None for source in sources):
        return [Stage(from_sizes(sizes, data.temperature or 1.0))]
    return [Stage(tuple(as_written(source.weight or 0.0) for source in sources))]


def from_sizes(sizes: Sequence[int], temperature: float) -> tuple[Fraction, ...]:
    """Weights proportional to size^(1 / temperature): 1 is by size, a high temperature makes all alike."""
    largest = max(sizes)
    return tuple(Fraction(repr(round((size / largest) ** (1 / temperature), 15))) for size in sizes)


def limits_of(data: DataSection, sizes: Sequence[int]) -> list[int | None]:
    """The most samples of each source that `max_epochs` allows."""
    return [
        None if source.max_epochs is None else int(as_written(source.max_epochs) * size)
        for source, size in zip(sources_of(data), sizes, strict=True)
    ]


def phases_of(data: DataSection, sizes: Sequence[int], length: int) -> list[Phase]:
    """The phases of a weighted mixture."""
    return phases(stages_of(data, sizes, length), limits_of(data, sizes), data.mixture_block or BLOCK)


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


# ---- the plan, for people


@dataclass(frozen=True)
class Plan:
    """What a run takes from each source.

    Attributes:
        names: of the sources.
        sizes: sequences in each.
        length: tokens per sequence.
        stages: for each stage that the run reaches, its first sample and each source's samples in it.
        block: sequences over which the shares are exact; None: the sources are read as one.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    length: int
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    block: int | None

    @property
    def total(self) -> tuple[int, ...]:
        """Each source's samples in the whole run."""
        return tuple(sum(counts[i] for _, counts in self.stages) for i in range(len(self.names)))

    def as_dict(self) -> dict:
        """For the manifest."""

        def told(counts: Sequence[int]) -> dict:
            whole = sum(counts) or 1
            return {
                name: {"share": count / whole, "tokens": count * self.length, "epochs": count / size}
                for name, count, size in zip(self.names, counts, self.sizes, strict=True)
            }

        stages = [{"first_token": start * self.length, "sources": told(counts)} for start, counts in self.stages]
        return {"block": self.block, "sources": told(self.total), "stages": stages}

    def lines(self) -> list[str]:
        """As text: a line that says what follows, and one for each source (and, with a curriculum, each stage)."""
        exact = f"shares exact over every {self.block:,} sequences" if self.block else "read as one"
        lines = [f"{len(self.names)} sources in sequences of {self.length:,}, {exact}:"]
        widest = max(map(len, self.names))
        for name, count, size in zip(self.names, self.total, self.sizes, strict=True):
            lines.append(
                f"  {name:{widest}}  {percent(count, sum(self.total)):>7}  {count * self.length:>15,} tokens, "
                f"{count / size:.3g} epochs of {size * self.length:,}"
            )
        if len(self.stages) > 1:
            for start, counts in self.stages:
                shares = ", ".join(
                    f"{name} {percent(count, sum(counts))}" for name, count in zip(self.names, counts, strict=True)
                )
                lines.append(f"  from token {start * self.length:,}: {shares}")
        return lines


def unknown_tokenizers(data: DataSection) -> str | None:
    """What to say where nobody knows a store's tokenizer, and others are there to differ from; None if all is known."""
    from weft.config.headers import read_store_header

    train = [data.train] if isinstance(data.train, str) else [getattr(s, "store", None) for s in sources_of(data)]
    stores = [store for store in (*train, data.validation) if isinstance(store, str)]
    unknown = [store for store in stores if read_store_header(store).tokenizer_digest is None]
    if not unknown or (len(train) < 2 and len(unknown) == len(stores)):
        return None
    return (
        f"the tokenizer of {', '.join(unknown)} is not known (`weft data convert` was not told it): nothing checks "
        "that its ids mean the same as the other stores'; convert again with --tokenizer"
    )


def percent(part: int, whole: int) -> str:
    """A share in percent."""
    return f"{100 * part / (whole or 1):.2f}%"


def plan(data: DataSection, sizes: Sequence[int], length: int, samples: int) -> Plan:
    """What a run of `samples` sequences takes from each of `data.train`'s sources."""
    names = tuple(source.label for source in sources_of(data))
    if not weighted(data):
        return Plan(names, tuple(sizes), length, ((0, tuple(largest_remainders(samples, sizes))),), None)
    reached: dict[int, tuple[int, list[int]]] = {}
    for phase in phases_of(data, sizes, length):
        here = min(samples, samples if phase.stop is None else phase.stop) - phase.start
        if here <= 0:
            break
        _, counts = reached.setdefault(phase.stage, (phase.start, [0] * len(names)))
        whole, part = divmod(here, phase.block)
        rest = largest_remainders(part, phase.counts)
        for i, (count, more) in enumerate(zip(phase.counts, rest, strict=True)):
            counts[i] += whole * count + more
    stages = tuple((start, tuple(counts)) for start, counts in reached.values())
    return Plan(names, tuple(sizes), length, stages, data.mixture_block or BLOCK)
