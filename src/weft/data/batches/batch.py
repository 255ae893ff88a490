"""What a step learns from: samples of a dataset, stacked to one rank's rows of the global batch."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch

from weft.config.errors import UserError

IGNORED = -100  # as a label: what torch, and with it everyone, leaves out of the loss


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

    def cut(self, length: int) -> Batch:
        """The same tokens in the same order, in shorter rows: `[rows x seq / length, length]`.

        Positions begin anew with each row: those of the document that it begins in. Labels and weights stay, a row's
        last label too.

        Raises:
            ValueError: `length` does not divide the rows.
        """
        rows, seq = self.tokens.shape
        if length < 1 or seq % length:
            raise ValueError(f"rows of {seq} tokens cannot be cut into rows of {length}")
        each = seq // length
        samples = self.samples.repeat_interleave(each)
        short = self._map(lambda t: t.reshape(rows * each, length) if t.dim() == 2 else samples)
        first = torch.ones_like(short.tokens, dtype=torch.bool)
        if short.segments is not None:
            first = (short.segments != short.segments[:, :1]).cumsum(1) == 0  # the row's first document
        short.positions = torch.where(first, short.positions - short.positions[:, :1], short.positions)
        return short

    def padded(self, rows: int) -> Batch:
        """With so many rows more, which count for nothing."""
        more = self._map(lambda t: torch.cat((t, t[:1].expand(rows, *t.shape[1:]))))
        more.weight[len(self.weight) :] = 0
        more.samples[len(self.samples) :] = -1
        return more

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
    """What can be trained on.

    A class with `complete = True` gives every part as arrays of one length, unchecked. It may also have
    `read(indices)`, which gives many samples at once, each part stacked `[n, seq]`; and `where(index)`, which says in
    words where a sample comes from.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`tokens` `[seq]`; optionally `labels` (default: the next token), `weight`, `positions`, `segments`."""
        ...


def collate(
    dataset: Dataset, indices: Sequence[int] | np.ndarray, samples: np.ndarray, *, rows: int, real: int
) -> Batch:
    """Read samples and stack them to `rows` rows, of which the first `real` count.

    Raises:
        UserError: the dataset gave something that is no sample; says which.
    """
    parts = read_samples(dataset, np.asarray(indices, np.int64))
    if missing := rows - len(indices):
        parts = {key: np.concatenate([part, np.repeat(part[:1], missing, axis=0)]) for key, part in parts.items()}
    parts["weight"][real:] = 0
    numbers = torch.full((rows,), -1, dtype=torch.int64)
    numbers[:real] = torch.from_numpy(np.asarray(samples[:real], np.int64))
    stacked = {key: torch.from_numpy(part) for key, part in parts.items()}
    return Batch(**{"segments": None, **stacked}, samples=numbers)


def read_samples(dataset: Dataset, indices: np.ndarray) -> dict[str, np.ndarray]:
    """The parts of samples, each stacked `[n, seq]`: tokens, labels, weight, positions and, if any has them, segments.

    Raises:
        UserError: something that is no sample, or samples that are not equally long; says which.
    """
    if getattr(dataset, "complete", False) and hasattr(dataset, "read"):
        return dataset.read(indices)
    read = [_sample(dataset, int(index)) for index in indices]
    length = len(read[0]["tokens"])
    for index, sample in zip(indices, read, strict=True):
        if len(sample["tokens"]) != length:
            raise UserError(
                f"sample {index} has {len(sample['tokens'])} tokens where others have {length}; all must be as long"
            )
    stacked = {key: np.stack([s[key] for s in read]) for key in ("tokens", "labels", "weight", "positions")}
    if any("segments" in sample for sample in read):
        one_document = np.zeros(length, np.int64)
        stacked["segments"] = np.stack([sample.get("segments", one_document) for sample in read])
    return stacked


def _sample(dataset: Dataset, index: int) -> dict[str, np.ndarray]:
    """One sample with all its parts, as arrays of one length."""
    if getattr(dataset, "complete", False):
        return dataset[index]
    name = type(dataset).__name__
    try:
        given = dataset[index]
    except UserError:
        raise
    except Exception as error:
        raise UserError(*_in_users_code(error, dataset, index)) from error
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
        sample = {"tokens": tokens, "labels": np.roll(tokens, -1), "positions": np.arange(len(tokens))}
        sample |= {key: np.asarray(part) for key, part in given.items() if key != "weight"}
        for key, part in sample.items():
            if part.dtype.kind not in "iu":
                raise ValueError(f"{key} must be integers, and are {part.dtype}")
        sample = {key: part.astype(np.int64) for key, part in sample.items()}
        sample["weight"] = np.array(given.get("weight", np.ones(len(tokens))), np.float32)
        for key, part in sample.items():
            if part.shape != tokens.shape:
                raise ValueError(f"{key} has shape {part.shape}, tokens {tokens.shape}")
        if not (sample["weight"] >= 0).all():
            raise ValueError("a weight must be 0 or more")
        if "labels" not in given:
            sample["weight"][-1] = 0  # what follows the last token is not known
        unlabelled = sample["labels"] == IGNORED
        sample["weight"][unlabelled] = sample["labels"][unlabelled] = 0
        if (lowest := min(sample["tokens"].min(), sample["labels"].min())) < 0:
            raise ValueError(f"{lowest} is no token's number, nor {IGNORED}, a label that does not count")
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}[{index}] is no sample: {error}") from None
    return sample


def _in_users_code(error: Exception, dataset: Dataset, index: int) -> tuple[str, str, int | None]:
    """What a dataset of the user's own raised, in one line, and where in its file."""
    name = type(dataset).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == inspect.getsourcefile(type(dataset))]
    place = (own or frames)[-1]
    what = " ".join(str(error).split())
    return (
        f"{name}[{index}] raised {type(error).__name__}{': ' if what else ''}{what}; mend it and run the command again",
        place.filename,
        place.lineno,
    )
