"""Batches as a function of the step: no state, no index files, the same order for any number of ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from weft.config.errors import UserError
from weft.data.permutation import Permutation
from weft.data.store import TokenStore


@dataclass
class Batch:
    """One rank's rows of one global batch.

    Attributes:
        tokens, labels, positions: int64 `[rows, seq]`.
        weight: float32 `[rows, seq]`: how much each label counts; 0 where nothing is learned; padding rows are 0.
        segments: int64 `[rows, seq]`: which document a token is of, where attention keeps them apart; or None.
        samples: int64 `[rows]`: numbers of the samples over all epochs; -1 for padding.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor | None
    samples: torch.Tensor

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of at most `rows` rows."""
        return [self._map(lambda t, a=a: t[a : a + rows]) for a in range(0, len(self.tokens), rows)]

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same in page-locked memory, from where a GPU copies faster."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function) -> Batch:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if t is None else function(t) for name, t in parts.items()})


class Dataset(Protocol):
    """What can be trained on. A user's own class needs these two; `read` in its place is faster."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`tokens` `[seq]`; optionally `labels` (default: the next token), `weight`, `positions`, `segments`."""
        ...


class StoreDataset:
    """The windows of a token store: sample `i` is `tokens[i * length : (i + 1) * length + 1]`, end to end."""

    def __init__(self, store: TokenStore, sequence_length: int):
        self.store, self.length = store, sequence_length
        self.samples = (store.num_tokens - 1) // sequence_length
        if self.samples < 1:
            raise UserError(
                f"{store.num_tokens:,} tokens are shorter than one sequence of {sequence_length} and the token after "
                "it; shorten data.sequence_length or pack more text",
                store.path,
            )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        window = np.asarray(self.store.tokens[index * self.length : (index + 1) * self.length + 1], np.int64)
        return {"tokens": window[:-1], "labels": window[1:], "weight": np.ones(self.length, np.float32)}


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


def collate(
    dataset: Dataset, indices: Sequence[int] | np.ndarray, samples: np.ndarray, *, rows: int, real: int
) -> Batch:
    """Read samples and stack them to `rows` rows, of which the first `real` count.

    Raises:
        UserError: the dataset gave something that is no sample; says which.
    """
    read = [_sample(dataset, int(index)) for index in indices]
    length = len(read[0]["tokens"])
    for index, sample in zip(indices, read, strict=True):
        if len(sample["tokens"]) != length:
            raise UserError(
                f"sample {index} has {len(sample['tokens'])} tokens where others have {length}; all must be as long"
            )
    padding = [read[0]] * (rows - len(read))
    stacked = {
        key: torch.from_numpy(np.stack([sample[key] for sample in read + padding]))
        for key in ("tokens", "labels", "weight", "positions")
    }
    stacked["weight"][real:] = 0
    segments = None
    if "segments" in read[0]:
        segments = torch.from_numpy(np.stack([sample["segments"] for sample in read + padding]))
    numbers = torch.full((rows,), -1, dtype=torch.int64)
    numbers[:real] = torch.from_numpy(np.asarray(samples[:real], np.int64))
    return Batch(**stacked, segments=segments, samples=numbers)


def _sample(dataset: Dataset, index: int) -> dict[str, np.ndarray]:
    """One sample with all its parts, as arrays of one length."""
    if isinstance(dataset, StoreDataset):
        sample = dataset[index]
        sample["positions"] = np.arange(dataset.length, dtype=np.int64)
        return sample
    name = type(dataset).__name__
    given = dataset[index]
    if not isinstance(given, dict) or "tokens" not in given:
        raise UserError(f"{name}[{index}] is no mapping with 'tokens'; return {{'tokens': integers [seq], ...}}")
    if unknown := given.keys() - {"tokens", "labels", "weight", "positions", "segments"}:
        raise UserError(
            f"{name}[{index}] has an unknown part {sorted(unknown)[0]!r}; a sample has tokens and optionally "
            "labels, weight, positions and segments"
        )
    try:
        tokens = np.asarray(given["tokens"])
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) == 0:
            raise ValueError("tokens must be integers of shape [seq]")
        tokens = tokens.astype(np.int64)
        weight = np.array(given.get("weight", np.ones(len(tokens))), np.float32)
        if "labels" not in given:
            weight[-1] = 0  # what follows the last token is not known
        sample = {
            "tokens": tokens,
            "labels": np.asarray(given.get("labels", np.roll(tokens, -1)), np.int64),
            "weight": weight,
            "positions": np.asarray(given.get("positions", np.arange(len(tokens))), np.int64),
        }
        if "segments" in given:
            sample["segments"] = np.asarray(given["segments"], np.int64)
        for key, part in sample.items():
            if part.shape != tokens.shape:
                raise ValueError(f"{key} has shape {part.shape}, tokens {tokens.shape}")
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}[{index}] is no sample: {error}") from None
    return sample


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
