"""Concatenates the datasets of a mixture, and maps each sample of a run to a sample of a dataset.

`weft.mixing` computes the shares of the datasets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from weft.data.batches.layout import PLAIN, Layout
from weft.data.batches.order import Epochs
from weft.data.batches.samples import Dataset, check_same_shape, read_samples
from weft.data.permutation import mix
from weft.errors import UserError
from weft.mixing import Phase


class ConcatDataset:
    """A dataset that concatenates several datasets, in order.

    Args:
        names: names of the datasets, for messages. `MixtureOrder` also uses each name as part of a seed.
        datasets: the datasets to concatenate.
        layout: what every sample contains.
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
        return {key: array[0] for key, array in self.read(np.array([index])).items()}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the samples at `indices` with their extra fields, stacked `[n, seq]` or `[n, sequences, seq]`.

        If only some datasets have `segments`, each sequence of the other datasets is treated as one document.

        Raises:
            UserError: the sequences of the datasets have different lengths.
        """
        sources = self._sources_of(indices)
        result: dict[str, np.ndarray] = {}
        for source in np.unique(sources):
            positions = np.flatnonzero(sources == source)
            arrays = read_samples(self.datasets[source], indices[positions] - self.starts[source], self.layout)
            for key, array in arrays.items():
                if key not in result:
                    result[key] = np.zeros((len(indices), *array.shape[1:]), array.dtype)
                subject = f"{self.names[source]} has{' sequences of' * (key == 'tokens')}"
                check_same_shape(subject, key, array[0], result[key][0])
                result[key][positions] = array
        return result

    def sources(self, indices: np.ndarray) -> list[str]:
        """Returns the distinct names of the datasets that contain the samples at `indices`, sorted as in `names`."""
        return [self.names[source] for source in np.unique(self._sources_of(indices))]

    def where(self, index: int) -> str:
        """Describes the origin of a sample, for messages."""
        source = int(self._sources_of(np.array([index]))[0])
        inner = index - int(self.starts[source])
        describe = getattr(self.datasets[source], "where", None)
        return describe(inner) if describe is not None else f"sample {inner} of {self.names[source]}"

    def _sources_of(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, indices, side="right") - 1


class MixtureOrder:
    """The order of a mixture: maps each sample of a run to a sample of a `ConcatDataset`.

    The samples of a run are divided into blocks. A `Phase` is a range of blocks that all have the same number
    of samples of source 0, the same number of source 1, and so on. In a block, the samples of a source are spread
    evenly: the block is divided into one interval per sample, and each sample has a random position in its interval. So
    each source's share is exact in each block, and nearly exact in any short range of samples. The `k`-th sample of a
    source in the run is the `k`-th sample of that source's shuffled epochs, independent of other sources.

    Args:
        dataset: the sources of the mixture.
        phases: phases of the run, from `weft.mixing.phases`.
        seed: seed of all orders. The order of a source also depends on the source's name.
        shuffle: whether to shuffle each source; False keeps the order within each source.
    """

    def __init__(self, dataset: ConcatDataset, phases: Sequence[Phase], *, seed: int = 0, shuffle: bool = True):
        self.phases, self.seed = list(phases), seed
        self.first = np.array([phase.start for phase in phases], np.int64)
        self.starts = dataset.starts
        self.orders = [
            Epochs(size, seed, name, shuffle=shuffle) for name, size in zip(dataset.names, dataset.sizes, strict=True)
        ]
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        sources, numbers = self.locate(samples)
        result = np.empty_like(numbers)
        for source in np.unique(sources):
            selected = sources == source
            result[selected] = self.starts[source] + self.orders[source](numbers[selected])
        return result

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each sample, the index of its source, and its index among the run's samples from that source.

        Both are int64 `[n]`.

        Args:
            samples: indices of samples in the run, `[n]`.

        Raises:
            UserError: a sample lies beyond the end of the mixture, because the sources are exhausted.
        """
        samples = np.asarray(samples, np.int64)
        sources, numbers = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        in_phase = np.searchsorted(self.first, samples, side="right") - 1
        for which in np.unique(in_phase):
            phase, positions = self.phases[which], np.flatnonzero(in_phase == which)
            blocks, slots = np.divmod(samples[positions] - phase.start, phase.block)
            if phase.stop is not None and int(samples[positions].max()) >= phase.stop:
                raise UserError("the sources of data.train are exhausted; raise max_epochs or shorten the run")
            counts, before = np.array(phase.counts, np.int64), np.array(phase.before, np.int64)
            for block in np.unique(blocks):
                selected = blocks == block
                block_sources, block_numbers = self._block(phase, int(block))
                source = block_sources[slots[selected]]
                sources[positions[selected]] = source
                numbers[positions[selected]] = before[source] + block * counts[source] + block_numbers[slots[selected]]
        return sources, numbers

    def _block(self, phase: Phase, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each sample of a block, its source's index, and its index among the block's samples of this
        source.

        `block`: index of the block in the phase.
        """
        first = phase.start + block * phase.block
        if first not in self._blocks:
            if len(self._blocks) >= 4:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[first] = interleave(phase.counts, self.seed, first)
        return self._blocks[first]


def interleave(counts: Sequence[int], *key: int) -> tuple[np.ndarray, np.ndarray]:
    """Spreads `counts[s]` items of each source `s` evenly over one block, with random jitter.

    The block is divided into `counts[s]` equal intervals for each source; item `k` gets a random position in interval
    `k`.

    Args:
        key: seed of the random positions.

    Returns:
        The source of the item at each position of the block, and the item's index `k` among the items of this source;
        both int64 `[sum(counts)]`.
    """
    sources = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts]).astype(np.int64)
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    salt, golden = np.frombuffer(digest, "<u8"), np.uint64(0x9E3779B97F4A7C15)
    noise = mix(np.arange(len(sources), dtype=np.uint64) * golden + salt)  # arrays overflow without a warning
    jitter = (noise >> np.uint64(11)) * 2.0**-53
    order = np.argsort((numbers + jitter) / np.asarray(counts)[sources], kind="stable")
    return sources[order], numbers[order]
