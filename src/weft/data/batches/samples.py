"""Reading samples of a dataset, checking what a custom one returns, and stacking them to batches."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from weft.data.batches.batch import Batch
from weft.data.batches.layout import PARTS, PLAIN, Layout
from weft.errors import UserError

IGNORED = -100  # as a label: what torch, and with it everyone, leaves out of the loss


class Dataset(Protocol):
    """What can be trained on.

    A class with `complete = True` gives every part as arrays of one length, unchecked but for its ids. It may also have
    `read(indices)`, which gives many samples at once, each part stacked `[n, ...]`; and `where(index)`, which says in
    words where a sample comes from.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`tokens` `[seq]`; optionally `labels` (default: the next token), `weight`, `positions`, `segments`.

        A sample of several sequences has each part as `[sequences, seq]`. Fields that the objective declares stand
        beside these parts.
        """
        ...


def collate(
    dataset: Dataset,
    indices: Sequence[int] | np.ndarray,
    samples: np.ndarray,
    *,
    rows: int,
    real: int,
    layout: Layout = PLAIN,
) -> Batch:
    """Read samples and stack them to a batch of `rows` samples, of which the first `real` count.

    Raises:
        UserError: the dataset gave something that is no sample; says which.
    """
    parts = read_samples(dataset, np.asarray(indices, np.int64), layout)
    if missing := rows - len(indices):
        parts = {key: np.concatenate([part, part[:1].repeat(missing, 0)]) for key, part in parts.items()}
    parts["weight"][real:] = 0
    numbers = torch.full((rows,), -1, dtype=torch.int64)
    numbers[:real] = torch.from_numpy(np.asarray(samples[:real], np.int64))
    # From samples to rows: [samples, sequences, ...] to [rows, ...].
    parts = {key: part.reshape(-1, *part.shape[1 + len(layout.lead) :]) for key, part in parts.items()}
    stacked = {key: torch.from_numpy(part) for key, part in parts.items()}
    extra = {name: stacked.pop(name) for name in layout.fields}
    numbers = numbers.repeat_interleave(layout.sequences)
    return Batch(**{"segments": None, **stacked}, samples=numbers, extra=extra, layout=layout)


def read_samples(dataset: Dataset, indices: np.ndarray, layout: Layout = PLAIN) -> dict[str, np.ndarray]:
    """The parts of samples, each `[n, seq]`, or `[n, sequences, seq]`: tokens, labels, weight, positions and, if any
    sample has them, segments; and the layout's fields.

    Raises:
        UserError: something that is no sample, or samples that are not equally long; says which.
    """
    if getattr(dataset, "complete", False) and (read := getattr(dataset, "read", None)) is not None:
        return _checked(dataset, indices, read(indices), layout)
    samples = [_sample(dataset, int(index), layout) for index in indices]
    for index, sample in zip(indices, samples, strict=True):
        for name in ("tokens", *layout.fields):
            raise_unless_alike(f"sample {index} has", name, sample[name], samples[0][name])
    parts = ("tokens", "labels", "weight", "positions", *layout.fields)
    stacked = {key: np.stack([sample[key] for sample in samples]) for key in parts}
    if any("segments" in sample for sample in samples):
        one_document = np.zeros_like(samples[0]["tokens"])
        stacked["segments"] = np.stack([sample.get("segments", one_document) for sample in samples])
    return _checked(dataset, indices, stacked, layout)


def raise_unless_alike(told: str, name: str, part: np.ndarray, other: np.ndarray) -> None:
    """Raises UserError if two samples' parts are not of one shape; `told` is how its line begins."""
    if part.shape == other.shape:
        return
    if name == "tokens":
        raise UserError(f"{told} {part.shape[-1]} tokens where others have {other.shape[-1]}; all must be as long")
    raise UserError(f"{told} {name} of shape {part.shape} where others have {other.shape}; all must have one shape")


def _checked(
    dataset: Dataset, indices: np.ndarray, parts: dict[str, np.ndarray], layout: Layout
) -> dict[str, np.ndarray]:
    """The same parts. One pass over the ids on the host: on a GPU an id beyond the embedding breaks the device.

    Raises:
        UserError: an id that the model has no embedding for; names the sample.
    """
    most = layout.vocab_size or 2**63  # as unsigned numbers, negative ids are beyond every vocabulary
    for key in ("tokens", "labels"):
        if key not in parts or not (wrong := parts[key].astype(np.int64, copy=False).view(np.uint64) >= most).any():
            continue
        if key == "labels" and (ignored := parts[key] == IGNORED).any():
            parts["weight"][ignored] = parts[key][ignored] = 0
            wrong &= ~ignored
        if wrong.any():
            place, known = tuple(np.argwhere(wrong)[0]), layout.vocab_size
            ids = f"ids are 0 to {known - 1}, as model.vocab_size is {known}" if known else "ids are 0 or more"
            raise UserError(
                f"{type(dataset).__name__}[{indices[place[0]]}] has {parts[key][place]} among its {key}; {ids}"
            )
    return parts


def _sample(dataset: Dataset, index: int, layout: Layout) -> dict[str, np.ndarray]:
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
    if unknown := given.keys() - {*PARTS, *layout.fields}:
        declared = f", and the objective's {', '.join(layout.fields)}" if layout.fields else ""
        raise UserError(
            f"{name}[{index}] has an unknown part {sorted(unknown)[0]!r}; a sample has tokens and optionally "
            f"labels, weight, positions and segments{declared}; an objective declares further parts in `fields`"
        )
    if missing := layout.fields.keys() - given.keys():
        raise UserError(f"{name}[{index}] has no {sorted(missing)[0]!r}, which the objective declares in `fields`")
    try:
        sample = _parts(given, layout)
        for key, declared_field in layout.fields.items():
            try:
                sample[key] = declared_field.convert(given[key], sample["tokens"].shape[-1], layout.lead)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{key} {error}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}[{index}] is no sample: {error}") from None
    return sample


def _parts(given: dict[str, Any], layout: Layout) -> dict[str, np.ndarray]:
    """The parts that every sample has, completed and checked; raises ValueError."""
    tokens, lead = np.asarray(given["tokens"]), layout.lead
    if tokens.ndim == 0 or tokens.shape[:-1] != lead or tokens.dtype.kind not in "iu" or tokens.size == 0:
        raise ValueError(f"tokens must be integers of shape [{''.join(f'{size}, ' for size in lead)}seq]")
    positions = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    sample = {"tokens": tokens, "labels": np.roll(tokens, -1, axis=-1), "positions": positions}
    sample |= {key: np.asarray(given[key]) for key in PARTS if key in given and key != "weight"}
    for key, part in sample.items():
        if part.dtype.kind not in "iu":
            raise ValueError(f"{key} must be integers, and are {part.dtype}")
    sample = {key: part.astype(np.int64) for key, part in sample.items()}
    sample["weight"] = np.array(given.get("weight", np.ones(tokens.shape)), np.float32)
    for key, part in sample.items():
        if part.shape != tokens.shape:
            raise ValueError(f"{key} has shape {part.shape}, tokens {tokens.shape}")
    if not (sample["weight"] >= 0).all():
        raise ValueError("a weight must be 0 or more")
    if "labels" not in given:
        sample["weight"][..., -1] = 0  # what follows the last token is not known
    unlabelled = sample["labels"] == IGNORED
    sample["weight"][unlabelled] = sample["labels"][unlabelled] = 0
    if (lowest := min(sample["tokens"].min(), sample["labels"].min())) < 0:
        raise ValueError(f"{lowest} is no token's number, nor {IGNORED}, a label that does not count")
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
