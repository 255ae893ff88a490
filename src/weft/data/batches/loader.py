"""Batches as a function of the step: no state, no index files, the same order for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.data.batches.batch import Batch
from weft.data.batches.layout import PLAIN, Layout
from weft.data.batches.mixture import Joined
from weft.data.batches.order import Epochs, Order
from weft.data.batches.samples import Dataset, collate
from weft.data.batches.workers import read_ahead
from weft.data.sequences.length_warmup import LengthWarmup
from weft.errors import UserError


class BatchSource:
    """The batches of a run. `batch(step)` is a function of the step alone.

    Step `s` takes samples `s * rows` to `(s + 1) * rows - 1` of the run; where these lie in the dataset, the `order`
    says; only then are they shared out to ranks.

    Args:
        rows: samples of the global batch: its sequences, where a sample is one.
        rank, ranks: which part of it is this rank's; short parts are padded with rows of weight 0.
        seed: of the order, if none is given: every epoch is a permutation keyed by seed and epoch; None: as they are.
        order: sample numbers to indices of the dataset.
        length_warmup: cuts the sequences of early steps into shorter rows.
        layout: what a sample consists of.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        rows: int,
        rank: int = 0,
        ranks: int = 1,
        seed: int | None = 0,
        order: Order | None = None,
        length_warmup: LengthWarmup | None = None,
        layout: Layout = PLAIN,
    ):
        self.dataset, self.rows, self.rank, self.ranks, self.layout = dataset, rows, rank, ranks, layout
        self.samples_per_epoch = len(dataset)
        if self.samples_per_epoch < 1:
            raise UserError("the training dataset has no samples; check data.train")
        self.order = order or Epochs(self.samples_per_epoch, seed or 0, shuffle=seed is not None)
        self.length_warmup = length_warmup

    def samples(self, step: int) -> np.ndarray:
        """The numbers of the samples of a step's global batch, over all epochs `[rows]`."""
        return np.arange(step * self.rows, (step + 1) * self.rows, dtype=np.int64)

    def mine(self, step: int) -> np.ndarray:
        """The numbers of this rank's samples of a step."""
        each = -(-self.rows // self.ranks)
        return self.samples(step)[self.rank * each : (self.rank + 1) * each]

    def read(self, step: int) -> np.ndarray:
        """What this rank reads: one without rows the step's first sample, to have something of the right shape."""
        mine = self.mine(step)
        return mine if len(mine) else self.samples(step)[:1]

    def batch(self, step: int) -> Batch:
        """This rank's rows of the global batch of `step`, counted from 0."""
        each, read, real = -(-self.rows // self.ranks), self.read(step), len(self.mine(step))
        batch = collate(self.dataset, self.order(read), read, rows=each, real=real, layout=self.layout)
        if self.length_warmup is None:
            return batch
        length, expected = batch.tokens.shape[1], self.length_warmup.sequence_length
        if length != expected:
            raise UserError(
                f"data.length_warmup cuts sequences of {expected} tokens, data.sequence_length, but the dataset's have "
                f"{length}; set data.sequence_length to that"
            )
        return batch.cut(self.length_warmup.length(step))

    def where(self, step: int) -> str:
        """Where this rank's samples of a step come from, in words."""
        samples = self.read(step)
        describe = getattr(self.dataset, "where", lambda index: f"sample {index} of {type(self.dataset).__name__}")
        indices = self.order(samples)
        first, last = (describe(int(index)) for index in indices[[0, -1]])
        if len(samples) == 1:
            return f"sample {samples[0]:,}: {first}"
        sources = self.dataset.sources(indices) if isinstance(self.dataset, Joined) else []
        among = f" (of {', '.join(sources)})" if len(sources) > 1 else ""
        return f"samples {samples[0]:,} to {samples[-1]:,}{among}: the first is {first}, the last {last}"

    def iterate(self, start: int, stop: int, workers: int = 0) -> Iterator[Batch]:
        """The batches of steps `start` to `stop - 1`; with `workers`, read ahead by so many processes.

        Raises:
            UserError: a sample that is none, with its number; a worker that was killed, with what it read.
        """
        if workers > 0:
            yield from read_ahead(self, start, stop, workers)
            return
        for step in range(start, stop):
            yield self.batch(step)


class ValidationBatches:
    """Every sample once, in order, `rows` at a time over all ranks; the last batch is padded.

    Args:
        limit: only the first so many samples.
        layout: what a sample consists of.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        rows: int,
        rank: int = 0,
        ranks: int = 1,
        limit: int | None = None,
        layout: Layout = PLAIN,
    ):
        self.dataset, self.rows, self.rank, self.ranks, self.layout = dataset, rows, rank, ranks, layout
        self.total = len(dataset) if limit is None else min(limit, len(dataset))

    def __len__(self) -> int:
        return -(-self.total // self.rows)

    def __iter__(self) -> Iterator[Batch]:
        each, rank = -(-self.rows // self.ranks), self.rank
        for start in range(0, self.total, self.rows):
            end = min(start + (rank + 1) * each, start + self.rows, self.total)
            mine = np.arange(start + rank * each, end, dtype=np.int64)
            read = mine if len(mine) else np.array([start])
            yield collate(self.dataset, read, read, rows=each, real=len(mine), layout=self.layout)
