"""What a run takes from each source of a mixture, for people and for the manifest.

No numpy here: `weft config check` shows the plan. `weft.data.batches.mixture` follows it, sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.config.data import DataSection
from weft.formatting import percent
from weft.mixing import BLOCK, largest_remainders


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


def plan(data: DataSection, sizes: Sequence[int], length: int, samples: int) -> Plan:
    """What a run of `samples` sequences takes from each of `data.train`'s sources."""
    names = tuple(source.label for source in data.sources)
    if not data.weighted:
        return Plan(names, tuple(sizes), length, ((0, tuple(largest_remainders(samples, sizes))),), None)
    reached: dict[int, tuple[int, list[int]]] = {}
    for phase in data.phases(sizes, length):
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
