"""Several datasets as one, and the order in which a mixture reads them. The shares are `weft.mixing`'s."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from weft.data.batches.layout import PLAIN, Layout
from weft.data.batches.order import Epochs
from weft.data.batches.samples import Dataset, raise_unless_alike, read_samples
from weft.data.permutation import mix
from weft.errors import UserError
from weft.mixing import Phase


class Joined:
    """Datasets end to end: the samples of the first, then those of the second, ...

    Args:
        names: what to call them.
        layout: what their samples consist of.
    """

    complete = True

    def __init__(self, names: Sequence[str], datasets: Sequence[Dataset], layout: Layout = PLAIN):
        self.names, self.datasets, self.layout = list(names), list(datasets), layout
        self.sizes = [len(dataset) for dataset in datasets]
        for name, size in zip(names, self.sizes, strict=True):
            if size < 1:
                raise UserError(f"the dataset {name} has no samples; check data.train")
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {key: part[0] for key, part in self.read(np.array([index])).items()}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The parts of samples, stacked `[n, seq]`, or `[n, sequences, seq]`; and their fields.

        Where only some sources tell documents apart, the rows of the others are one document each.

        Raises:
            UserError: the sources' sequences are not equally long.
        """
        chosen = np.searchsorted(self.starts, indices, side="right") - 1
        result: dict[str, np.ndarray] = {}
        for source in np.unique(chosen):
            here = np.flatnonzero(chosen == source)
            found = read_samples(self.datasets[source], indices[here] - self.starts[source], self.layout)
            for key, part in found.items():
                if key not in result:
                    result[key] = np.zeros((len(indices), *part.shape[1:]), part.dtype)
                told = f"{self.names[source]} has{' sequences of' * (key == 'tokens')}"
                raise_unless_alike(told, key, part[0], result[key][0])
                result[key][here] = part
        return result

    def sources(self, indices: np.ndarray) -> list[str]:
        """The names of the datasets that samples are of, in their order."""
        return [self.names[source] for source in np.unique(np.searchsorted(self.starts, indices, side="right") - 1)]

    def where(self, index: int) -> str:
        """Where a sample comes from, in words."""
        source = int(np.searchsorted(self.starts, index, side="right")) - 1
        within = index - int(self.starts[source])
        told = getattr(self.datasets[source], "where", None)
        return told(within) if told is not None else f"sample {within} of {self.names[source]}"


class MixtureOrder:
    """Which source each sample of a run comes from, and which of its samples: an `Order` over a `Joined` dataset.

    The block that a sample is in says how many of each source it holds (`Phase`); a source's samples are spread evenly
    over the block, each shifted at random within its own stretch. So the shares are exact over blocks, and nearly so
    over any few samples. The `k`-th sample of a source in the run is the `k`-th of that source's own epochs, whatever
    the other sources are.

    Args:
        seed: keys all orders; a source's epochs are keyed by its name as well.
        shuffle: False: every source in its own order (they are mixed all the same).
    """

    def __init__(self, joined: Joined, found: Sequence[Phase], *, seed: int = 0, shuffle: bool = True):
        self.phases, self.seed = list(found), seed
        self.first = np.array([phase.start for phase in found], np.int64)
        self.starts = joined.starts
        self.orders = [
            Epochs(size, seed, name, shuffle=shuffle) for name, size in zip(joined.names, joined.sizes, strict=True)
        ]
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        sources, numbers = self.locate(samples)
        result = np.empty_like(numbers)
        for source in np.unique(sources):
            chosen = sources == source
            result[chosen] = self.starts[source] + self.orders[source](numbers[chosen])
        return result

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's source, and its number among that source's samples in the run, both `[n]`.

        Raises:
            UserError: a sample after the sources' limits.
        """
        samples = np.asarray(samples, np.int64)
        sources, numbers = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        in_phase = np.searchsorted(self.first, samples, side="right") - 1
        for which in np.unique(in_phase):
            phase, here = self.phases[which], np.flatnonzero(in_phase == which)
            blocks, slots = np.divmod(samples[here] - phase.start, phase.block)
            if phase.stop is not None and int(samples[here].max()) >= phase.stop:
                raise UserError("the sources of data.train are used up; raise max_epochs or shorten the run")
            counts, before = np.array(phase.counts, np.int64), np.array(phase.before, np.int64)
            for block in np.unique(blocks):
                rows = blocks == block
                table_sources, table_numbers = self._block(phase, int(block))
                source = table_sources[slots[rows]]
                sources[here[rows]] = source
                numbers[here[rows]] = before[source] + block * counts[source] + table_numbers[slots[rows]]
        return sources, numbers

    def _block(self, phase: Phase, block: int) -> tuple[np.ndarray, np.ndarray]:
        """A block's slots `[block]`: which source, and which of its samples in this block."""
        first = phase.start + block * phase.block
        if first not in self._blocks:
            if len(self._blocks) >= 4:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[first] = interleave(phase.counts, self.seed, first)
        return self._blocks[first]


def interleave(counts: Sequence[int], *key: int) -> tuple[np.ndarray, np.ndarray]:
    """Spread `counts[s]` items of each source `s` evenly over one block, shifted at random.

    Item `k` of `count` falls, at random, into the `k`-th of `count` equal stretches of the block.

    Returns:
        Source of each slot, and its number among that source's items, in rising order; both int64 `[sum(counts)]`.
    """
    sources = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts]).astype(np.int64)
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    salt, golden = np.frombuffer(digest, "<u8"), np.uint64(0x9E3779B97F4A7C15)
    noise = mix(np.arange(len(sources), dtype=np.uint64) * golden + salt)  # arrays wrap around, and say nothing
    shift = (noise >> np.uint64(11)) * 2.0**-53
    order = np.argsort((numbers + shift) / np.asarray(counts)[sources], kind="stable")
    return sources[order], numbers[order]
