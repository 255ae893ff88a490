"""Batches as a function of the step: no state, no index files, the same order for any number of ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from weft.config.errors import UserError
from weft.data.batch import Batch, Dataset, collate
from weft.data.permutation import Permutation


class BatchSource:
    """The batches of a run. `batch(step)` is a function of the step alone.

    Sample number `n` of the run is the `n % samples`-th of epoch `n // samples`, whose order is a keyed permutation of
    (seed, epoch). Step `s` takes samples `s * rows` to `(s + 1) * rows - 1`; only then are they shared out to ranks.

    Args:
        rows: sequences of the global batch.
        rank, ranks: which part of it is this rank's; short parts are padded with rows of weight 0.
    """

    def __init__(
        self, dataset: Dataset, *, rows: int, rank: int = 0, ranks: int = 1, seed: int = 0, shuffle: bool = True
    ):
        self.dataset, self.rows, self.rank, self.ranks = dataset, rows, rank, ranks
        self.seed, self.shuffle = seed, shuffle
        self.samples_per_epoch = len(dataset)
        if self.samples_per_epoch < 1:
            raise UserError("the training dataset has no samples; check data.train")

    def samples(self, step: int) -> np.ndarray:
        """The numbers of the samples of a step's global batch, over all epochs `[rows]`."""
        return np.arange(step * self.rows, (step + 1) * self.rows, dtype=np.int64)

    def indices(self, samples: np.ndarray) -> np.ndarray:
        """Where in the dataset these samples are."""
        epochs, order = np.divmod(samples, self.samples_per_epoch)
        if not self.shuffle:
            return order
        result = np.empty_like(order)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = Permutation(self.samples_per_epoch, self.seed, int(epoch))(order[chosen])
        return result

    def batch(self, step: int) -> Batch:
        """This rank's rows of the global batch of `step`, counted from 0."""
        each = -(-self.rows // self.ranks)
        mine = self.samples(step)[self.rank * each : (self.rank + 1) * each]
        # A rank without rows reads the step's first sample, to have something of the right shape to pad with.
        read = mine if len(mine) else self.samples(step)[:1]
        return collate(self.dataset, self.indices(read), read, rows=each, real=len(mine))

    def iterate(self, start: int, stop: int, workers: int = 0) -> Iterator[Batch]:
        """The batches of steps `start` to `stop - 1`; with `workers`, read ahead by so many processes.

        Raises:
            UserError: a sample that is none, with its number.
        """
        if workers == 0:
            for step in range(start, stop):
                yield self.batch(step)
            return
        loader = DataLoader(
            _Steps(self),
            batch_size=None,
            sampler=range(start, stop),
            num_workers=workers,
            worker_init_fn=_ignore_interrupts,
            pin_memory=torch.cuda.is_available(),
        )
        for batch in loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch


class _Steps(TorchDataset):
    def __init__(self, source: BatchSource):
        self.source = source

    def __getitem__(self, step: int) -> Batch | UserError:
        try:
            return self.source.batch(step)
        except UserError as error:
            return error  # raised in the training process: DataLoader would wrap it in a traceback


def _ignore_interrupts(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer ends its workers itself


def validation_batches(
    dataset: Dataset, *, rows: int, rank: int = 0, ranks: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """Every sample once, in order, `rows` at a time over all ranks; the last batch is padded.

    Args:
        limit: only the first so many samples.
    """
    total = len(dataset) if limit is None else min(limit, len(dataset))
    each = -(-rows // ranks)
    for start in range(0, total, rows):
        mine = np.arange(start + rank * each, min(start + (rank + 1) * each, start + rows, total), dtype=np.int64)
        read = mine if len(mine) else np.array([start])
        yield collate(dataset, read, read, rows=each, real=len(mine))
