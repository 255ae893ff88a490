"""Summarizes how much a run reads from each source of a mixture, for the console and the manifest.

The module does not import numpy, because `weft config check`, which prints the plan, must be fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.config.data import DataSection
from weft.formatting import percent
from weft.mixing import BLOCK, largest_remainders


@dataclass(frozen=True)
class MixturePlan:
    """The number of samples that a run reads from each source.

    Attributes:
        names: names of the sources.
        sizes: number of sequences in each source.
        length: number of tokens per sequence.
        stages: one entry for each stage of the curriculum that the run reaches: the index in the run of the stage's
            first sample, and the number of samples of each source in the stage. One entry without a curriculum.
        block: number of sequences in a block, within which shares are exact; None if the sources are read as one
            dataset.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    length: int
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    block: int | None

    @property
    def total(self) -> tuple[int, ...]:
        """The number of samples of each source in the run."""
        return tuple(sum(counts[i] for _, counts in self.stages) for i in range(len(self.names)))

    def as_dict(self) -> dict:
        """Returns the plan as JSON values, for the manifest."""

        def describe(counts: Sequence[int]) -> dict:
            total = sum(counts) or 1
            return {
                name: {"share": count / total, "tokens": count * self.length, "epochs": count / size}
                for name, count, size in zip(self.names, counts, self.sizes, strict=True)
            }

        stages = [{"first_token": start * self.length, "sources": describe(counts)} for start, counts in self.stages]
        return {"block": self.block, "sources": describe(self.total), "stages": stages}

    def lines(self) -> list[str]:
        """Returns lines of text: a title, one line per source and, with a curriculum, one line per stage."""
        exact = f"shares exact over every {self.block:,} sequences" if self.block else "read as one dataset"
        lines = [f"{len(self.names)} sources in sequences of {self.length:,} tokens, {exact}:"]
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


def plan_mixture(data: DataSection, sizes: Sequence[int], length: int, samples: int) -> MixturePlan:
    """Returns the plan of a run of `samples` sequences from the sources of `data.train`.

    Args:
        sizes: number of sequences in each source.
        length: number of tokens per sequence.
    """
    names = tuple(source.label for source in data.sources)
    if not data.weighted:
        return MixturePlan(names, tuple(sizes), length, ((0, tuple(largest_remainders(samples, sizes))),), None)
    reached: dict[int, tuple[int, list[int]]] = {}
    for phase in data.phases(sizes, length):
        count = min(samples, samples if phase.stop is None else phase.stop) - phase.start
        if count <= 0:
            break
        _, counts = reached.setdefault(phase.stage, (phase.start, [0] * len(names)))
        blocks, remainder = divmod(count, phase.block)
        partial = largest_remainders(remainder, phase.counts)
        for i, (per_block, more) in enumerate(zip(phase.counts, partial, strict=True)):
            counts[i] += blocks * per_block + more
    stages = tuple((start, tuple(counts)) for start, counts in reached.values())
    return MixturePlan(names, tuple(sizes), length, stages, data.mixture_block or BLOCK)
