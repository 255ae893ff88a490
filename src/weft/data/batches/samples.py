"""Reads and checks samples of a dataset, and stacks them to batches."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from weft.data.batches.batch import Batch
from weft.data.batches.layout import PLAIN, TOKEN_KEYS, Layout
from weft.errors import UserError

IGNORED = -100  # a label without loss, as in PyTorch's `ignore_index`

Arrays = dict[str, np.ndarray]


class Dataset(Protocol):
    """A map-style dataset to train on.

    A class with `complete = True` returns all keys as arrays of one length, of which only the ids are checked. It may
    also have `read(indices)`, which returns several samples stacked `[n, ...]`. Any dataset may have `where(index)`,
    which describes the origin of a sample for messages.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `tokens` `[seq]`, and optionally `labels` (default: the next token), `weight`, `positions` and
        `segments`.

        In a sample of several sequences, each of these is `[sequences, seq]`. The mapping also has the fields that the
        objective declares.
        """
        ...


def collate(
    dataset: Dataset,
    indices: Sequence[int] | np.ndarray,
    samples: np.ndarray,
    *,
    batch_size: int,
    real: int,
    layout: Layout = PLAIN,
) -> Batch:
    """Reads samples and stacks them to a batch of `batch_size` samples. Only the first `real` have a weight.

    Raises:
        UserError: an invalid sample, with its index.
    """
    arrays = read_samples(dataset, np.asarray(indices, np.int64), layout)
    if missing := batch_size - len(indices):
        arrays = {key: np.concatenate([array, array[:1].repeat(missing, 0)]) for key, array in arrays.items()}
    arrays["weight"][real:] = 0
    numbers = torch.full((batch_size,), -1, dtype=torch.int64)
    numbers[:real] = torch.from_numpy(np.asarray(samples[:real], np.int64))
    # [samples, sequences, ...] -> [batch, ...]
    arrays = {key: array.reshape(-1, *array.shape[1 + len(layout.lead) :]) for key, array in arrays.items()}
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    extra = {name: tensors.pop(name) for name in layout.fields}
    numbers = numbers.repeat_interleave(layout.sequences)
    return Batch(**{"segments": None, **tensors}, samples=numbers, extra=extra, layout=layout)


def read_samples(dataset: Dataset, indices: np.ndarray, layout: Layout = PLAIN) -> Arrays:
    """Reads samples: tokens, labels, weight, positions, segments (if any sample has them) and the layout's fields.

    Returns:
        Arrays `[n, seq]`, or `[n, sequences, seq]`.

    Raises:
        UserError: an invalid sample, or samples of different lengths, with the index.
    """
    if getattr(dataset, "complete", False) and (read := getattr(dataset, "read", None)) is not None:
        return _check_ids(dataset, indices, read(indices), layout)
    samples = [_read_sample(dataset, int(index), layout) for index in indices]
    for index, sample in zip(indices, samples, strict=True):
        for name in ("tokens", *layout.fields):
            check_same_shape(f"sample {index} has", name, sample[name], samples[0][name])
    keys = ("tokens", "labels", "weight", "positions", *layout.fields)
    stacked = {key: np.stack([sample[key] for sample in samples]) for key in keys}
    if any("segments" in sample for sample in samples):
        one_document = np.zeros_like(samples[0]["tokens"])
        stacked["segments"] = np.stack([sample.get("segments", one_document) for sample in samples])
    return _check_ids(dataset, indices, stacked, layout)


def check_same_shape(subject: str, key: str, array: np.ndarray, other: np.ndarray) -> None:
    """Raises UserError if two samples' arrays differ in shape. `subject` begins the message."""
    if array.shape == other.shape:
        return
    if key == "tokens":
        raise UserError(f"{subject} {array.shape[-1]} tokens, others have {other.shape[-1]}; all must have one length")
    raise UserError(f"{subject} {key} of shape {array.shape}, others have {other.shape}; all must have one shape")


def _check_ids(dataset: Dataset, indices: np.ndarray, arrays: Arrays, layout: Layout) -> Arrays:
    """Checks on the host that the model has an embedding for each id: on a GPU, another id breaks the device.

    Raises:
        UserError: an id outside the vocabulary, with its sample.
    """
    limit = layout.vocab_size or 2**63  # as unsigned numbers, negative ids are above every limit
    for key in ("tokens", "labels"):
        if key not in arrays or not (wrong := arrays[key].astype(np.int64, copy=False).view(np.uint64) >= limit).any():
            continue
        if key == "labels" and (ignored := arrays[key] == IGNORED).any():
            arrays["weight"][ignored] = arrays[key][ignored] = 0
            wrong &= ~ignored
        if wrong.any():
            place, size = tuple(np.argwhere(wrong)[0]), layout.vocab_size
            ids = f"ids are 0 to {size - 1}, as model.vocab_size is {size}" if size else "ids are 0 or more"
            raise UserError(
                f"{type(dataset).__name__}[{indices[place[0]]}] has {arrays[key][place]} among its {key}; {ids}"
            )
    return arrays


def _read_sample(dataset: Dataset, index: int, layout: Layout) -> Arrays:
    """Reads one sample and completes it to arrays of one length."""
    if getattr(dataset, "complete", False):
        return dataset[index]
    name = type(dataset).__name__
    try:
        given = dataset[index]
    except UserError:
        raise
    except Exception as error:
        raise UserError(*_describe_error(error, dataset, index)) from error
    if not isinstance(given, dict) or "tokens" not in given:
        raise UserError(f"{name}[{index}] is not a dict with 'tokens'; return {{'tokens': integers [seq], ...}}")
    if unknown := given.keys() - {*TOKEN_KEYS, *layout.fields}:
        declared = f", and the objective's {', '.join(layout.fields)}" if layout.fields else ""
        raise UserError(
            f"{name}[{index}] has the unknown key {sorted(unknown)[0]!r}; a sample has tokens and optionally "
            f"labels, weight, positions and segments{declared}; an objective declares further keys in `fields`"
        )
    if missing := layout.fields.keys() - given.keys():
        raise UserError(f"{name}[{index}] has no {sorted(missing)[0]!r}, which the objective declares in `fields`")
    try:
        sample = _complete(given, layout)
        for key, declared_field in layout.fields.items():
            try:
                sample[key] = declared_field.convert(given[key], sample["tokens"].shape[-1], layout.lead)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{key} {error}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}[{index}] is not a valid sample: {error}") from None
    return sample


def _complete(given: dict[str, Any], layout: Layout) -> Arrays:
    """Returns the arrays of `TOKEN_KEYS` with defaults; `segments` only if given. Raises ValueError."""
    tokens, lead = np.asarray(given["tokens"]), layout.lead
    if tokens.ndim == 0 or tokens.shape[:-1] != lead or tokens.dtype.kind not in "iu" or tokens.size == 0:
        raise ValueError(f"tokens must be integers of shape [{''.join(f'{size}, ' for size in lead)}seq]")
    positions = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    sample = {"tokens": tokens, "labels": np.roll(tokens, -1, axis=-1), "positions": positions}
    sample |= {key: np.asarray(given[key]) for key in TOKEN_KEYS if key in given and key != "weight"}
    for key, array in sample.items():
        if array.dtype.kind not in "iu":
            raise ValueError(f"{key} must be integers, and are {array.dtype}")
    sample = {key: array.astype(np.int64) for key, array in sample.items()}
    sample["weight"] = np.array(given.get("weight", np.ones(tokens.shape)), np.float32)
    for key, array in sample.items():
        if array.shape != tokens.shape:
            raise ValueError(f"{key} has shape {array.shape}, tokens {tokens.shape}")
    if not (sample["weight"] >= 0).all():
        raise ValueError("a weight must be 0 or more")
    if "labels" not in given:
        sample["weight"][..., -1] = 0  # the token after the last one is unknown
    ignored = sample["labels"] == IGNORED
    sample["weight"][ignored] = sample["labels"][ignored] = 0
    if (lowest := min(sample["tokens"].min(), sample["labels"].min())) < 0:
        raise ValueError(f"{lowest} is neither a token id nor {IGNORED}, a label without loss")
    return sample


def _describe_error(error: Exception, dataset: Dataset, index: int) -> tuple[str, str, int | None]:
    """Describes an exception of a custom dataset in one line, with the file and line of the dataset."""
    name = type(dataset).__name__
    frames = traceback.extract_tb(error.__traceback__)
    custom = [frame for frame in frames if frame.filename == inspect.getsourcefile(type(dataset))]
    place = (custom or frames)[-1]
    message = " ".join(str(error).split())
    return (
        f"{name}[{index}] raised {type(error).__name__}{': ' if message else ''}{message}; "
        "fix it and run the command again",
        place.filename,
        place.lineno,
    )
