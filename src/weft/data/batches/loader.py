"""Computes the batch of any step without state. The order of samples is the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.data.batches.batch import Batch
from weft.data.batches.layout import PLAIN, Layout
from weft.data.batches.mixture import ConcatDataset
from weft.data.batches.order import Epochs, Order
from weft.data.batches.samples import Dataset, collate
from weft.data.batches.workers import prefetch
from weft.data.sequences.length_warmup import LengthWarmup
from weft.errors import UserError


class BatchSource:
    """The training batches of a run. `batch(step)` depends only on the step.

    Step `s` has the samples `s * batch_size` to `(s + 1) * batch_size - 1` of the run, which `order` maps to indices of
    the dataset. These samples are distributed over the ranks.

    Args:
        batch_size: number of samples in the global batch.
        rank, ranks: index of this rank, and number of ranks among which a batch is distributed. A rank with fewer
            samples than other ranks gets padding.
        seed: seed of the default order, which shuffles each epoch; None keeps the dataset's order.
        order: maps indices of samples in the run to indices of the dataset.
        length_warmup: schedule of shorter sequences in early steps; None: no step has shorter sequences.
        layout: what every sample contains.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        seed: int | None = 0,
        order: Order | None = None,
        length_warmup: LengthWarmup | None = None,
        layout: Layout = PLAIN,
    ):
        self.dataset, self.batch_size, self.layout = dataset, batch_size, layout
        self.rank, self.samples_per_rank = rank, -(-batch_size // ranks)
        self.samples_per_epoch = len(dataset)
        if self.samples_per_epoch < 1:
            raise UserError("the training dataset has no samples; check data.train")
        self.order = order or Epochs(self.samples_per_epoch, seed or 0, shuffle=seed is not None)
        self.length_warmup = length_warmup

    def samples(self, step: int) -> np.ndarray:
        """Returns the indices in the run (counted over all epochs) of the samples in a step's batch, `[batch_size]`."""
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)

    def rank_samples(self, step: int) -> np.ndarray:
        """Returns the indices in the run of the samples in this rank's part of a step's global batch."""
        return self.samples(step)[self.rank * self.samples_per_rank : (self.rank + 1) * self.samples_per_rank]

    def read(self, step: int) -> np.ndarray:
        """Returns the indices in the run of the samples that this rank reads for a step.

        A rank without samples reads the first sample of the global batch, as padding.
        """
        mine = self.rank_samples(step)
        return mine if len(mine) else self.samples(step)[:1]

    def batch(self, step: int) -> Batch:
        """Returns this rank's part of the global batch of `step` (counted from 0)."""
        read, real = self.read(step), len(self.rank_samples(step))
        batch = collate(
            self.dataset, self.order(read), read, batch_size=self.samples_per_rank, real=real, layout=self.layout
        )
        if self.length_warmup is None:
            return batch
        length, expected = batch.tokens.shape[1], self.length_warmup.sequence_length
        if length != expected:
            raise UserError(
                f"data.length_warmup splits sequences of {expected} tokens (data.sequence_length), but the dataset's "
                f"sequences have {length}; set data.sequence_length: {length}"
            )
        return batch.split_sequences(self.length_warmup.length(step))

    def where(self, step: int) -> str:
        """Describes the origin of this rank's samples of a step, for messages."""
        samples = self.read(step)
        describe = getattr(self.dataset, "where", lambda index: f"sample {index} of {type(self.dataset).__name__}")
        indices = self.order(samples)
        first, last = (describe(int(index)) for index in indices[[0, -1]])
        if len(samples) == 1:
            return f"sample {samples[0]:,}: {first}"
        sources = self.dataset.sources(indices) if isinstance(self.dataset, ConcatDataset) else []
        among = f" (of {', '.join(sources)})" if len(sources) > 1 else ""
        return f"samples {samples[0]:,} to {samples[-1]:,}{among}: the first is {first}, the last {last}"

    def iterate(self, start: int, stop: int, workers: int = 0) -> Iterator[Batch]:
        """Yields the batches of steps `start` to `stop - 1`.

        Args:
            workers: number of processes that prefetch batches; 0 reads them in this process.

        Raises:
            UserError: a sample is invalid, or a worker was killed. The message names the sample.
        """
        if workers > 0:
            yield from prefetch(self, start, stop, workers)
            return
        for step in range(start, stop):
            yield self.batch(step)


class ValidationBatches:
    """The batches of a validation pass. They contain every sample once, in order; the last batch is padded.

    Args:
        batch_size: number of samples in the global batch.
        rank, ranks: index of this rank, and number of ranks among which a batch is distributed.
        limit: maximum number of samples.
        layout: contents of a sample.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        limit: int | None = None,
        layout: Layout = PLAIN,
    ):
        self.dataset, self.batch_size, self.layout = dataset, batch_size, layout
        self.rank, self.samples_per_rank = rank, -(-batch_size // ranks)
        self.total = len(dataset) if limit is None else min(limit, len(dataset))

    def __len__(self) -> int:
        return -(-self.total // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        each = self.samples_per_rank
        for start in range(0, self.total, self.batch_size):
            end = min(start + (self.rank + 1) * each, start + self.batch_size, self.total)
            mine = np.arange(start + self.rank * each, end, dtype=np.int64)
            read = mine if len(mine) else np.array([start])
            yield collate(self.dataset, read, read, batch_size=each, real=len(mine), layout=self.layout)
