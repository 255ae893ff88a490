"""Reads and checks samples of a dataset, and stacks the samples to batches."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from weft.data.batches.batch import Batch
from weft.data.batches.layout import PLAIN, TOKEN_KEYS, Layout
from weft.errors import UserError

UNPAIRED = (
    "has an answer without its pair; a chosen and a rejected answer are two adjacent documents of one sequence: give "
    "both in one sequence, with `segments`"
)
IGNORED = -100  # a label without loss, the default `ignore_index` of PyTorch

Arrays = dict[str, np.ndarray]


class Dataset(Protocol):
    """A map-style dataset to train on.

    Optional members:

    - `complete = True`: samples already have all keys, as arrays of equal length. Only the token ids are checked.
    - `read(indices)`, if `complete` is true: returns several samples, stacked `[n, ...]`.
    - `where(index)`: describes the origin of a sample, for messages.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a sample: `tokens`, and the fields that the objective declares.

        Optional keys are `labels` (default: the next token), `weight`, `positions` and `segments`. Each value is an
        array `[seq]`, or `[sequences, seq]` if a sample has several sequences.
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
    """Reads samples, and stacks them to a batch of `batch_size` samples. Missing samples are padding.

    Args:
        indices: indices of the samples in the dataset.
        samples: index of each sample in the run, counted over all epochs.
        real: number of samples that are trained on. All samples after the first `real` samples get weight 0.

    Raises:
        UserError: a sample is invalid; the message names its index.
    """
    arrays = read_samples(dataset, np.asarray(indices, np.int64), layout)
    if missing := batch_size - len(indices):
        arrays = {key: np.concatenate([array, array[:1].repeat(missing, 0)]) for key, array in arrays.items()}
    arrays["weight"][real:] = 0
    numbers = np.full(batch_size, -1, np.int64)
    numbers[:real] = samples[:real]
    # [samples, sequences, ...] -> [batch, ...]
    arrays = {key: array.reshape(-1, *array.shape[1 + len(layout.lead) :]) for key, array in arrays.items()}
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    extra = {name: tensors.pop(name) for name in layout.fields}
    numbers = torch.from_numpy(numbers.repeat(layout.sequences))
    batch = Batch(**{"segments": None, **tensors}, samples=numbers, extra=extra, layout=layout)
    if (row := batch.unpaired_row()) is not None:
        name = f"{type(dataset).__name__}[{indices[row // layout.sequences]}]"
        raise UserError(f"{name} {UNPAIRED}")
    return batch.weigh_documents() if layout.weigh_documents else batch


def read_samples(dataset: Dataset, indices: np.ndarray, layout: Layout = PLAIN) -> Arrays:
    """Reads and stacks samples.

    Returns:
        Arrays `[n, seq]` or `[n, sequences, seq]` of tokens, labels, weight, positions and segments (only if a sample
        has segments), and the layout's fields.

    Raises:
        UserError: a sample is invalid, or the samples have different lengths; the message names the index.
    """
    complete = getattr(dataset, "complete", False)
    if complete and (read := getattr(dataset, "read", None)) is not None:
        return _check_ids(dataset, indices, read(indices), layout)
    if complete:
        samples = [dataset[int(index)] for index in indices]
    else:
        given = [_get_sample(dataset, int(index), layout) for index in indices]
        if (together := _convert_together(given, layout)) is not None:
            return _check_ids(dataset, indices, together, layout)
        names = (f"{type(dataset).__name__}[{index}]" for index in indices)
        samples = [_convert_sample(*each, layout) for each in zip(names, given, strict=True)]
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
    """Raises UserError if the arrays of two samples for one key have different shapes.

    The message begins with `subject`, and names the key `key`.
    """
    if array.shape == other.shape:
        return
    if key == "tokens":
        raise UserError(
            f"{subject} {array.shape[-1]} tokens, but other samples have {other.shape[-1]}; give all the same length"
        )
    raise UserError(f"{subject} {key} of shape {array.shape}, but others have {other.shape}; give all the same shape")


def _check_ids(dataset: Dataset, indices: np.ndarray, arrays: Arrays, layout: Layout) -> Arrays:
    """Checks the ids and positions of samples (see `first_invalid_id`), and returns `arrays`.

    Raises:
        UserError: an id is outside the vocabulary, or a position outside the table; the message names its sample.
    """
    if (found := first_invalid_id(arrays, layout)) is not None:
        place, what, allowed = found
        raise UserError(f"{type(dataset).__name__}[{indices[place[0]]}] has {what}; {allowed}")
    return arrays


def first_invalid_id(arrays: Arrays, layout: Layout) -> tuple[tuple[int, ...], str, str] | None:
    """Finds the first id outside the vocabulary, or the first position outside the table of positions. Sets the weight
    of ignored labels (-100) to 0.

    The check is on the CPU, because an invalid id would crash a GPU kernel.

    Returns:
        Index of the id, a text that names it and its array, and a text that says which are allowed; None if all are
        valid.
    """
    checked = [("tokens", "vocab_size"), ("labels", "vocab_size")]
    if layout.max_position_embeddings is not None:
        checked.append(("positions", "max_position_embeddings"))
    for key, setting in checked:
        size = getattr(layout, setting)
        limit = size or 2**63  # as unsigned numbers, negative ids are above every limit
        if key not in arrays or not (wrong := arrays[key].astype(np.int64, copy=False).view(np.uint64) >= limit).any():
            continue
        if key == "labels" and (ignored := arrays[key] == IGNORED).any():
            arrays["weight"][ignored] = arrays[key][ignored] = 0
            wrong &= ~ignored
        if wrong.any():
            place, kind = tuple(np.argwhere(wrong)[0]), "position" if key == "positions" else "id"
            allowed = f"0 to {size - 1} (model.{setting} is {size})" if size else "0 or more"
            return place, f"the {kind} {arrays[key][place]} in its {key}", f"{kind}s must be {allowed}"
    return None


def _get_sample(dataset: Dataset, index: int, layout: Layout) -> dict[str, Any]:
    """Returns a sample as the dataset has it, after a check of its keys."""
    name = type(dataset).__name__
    try:
        given = dataset[index]
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(*_describe_error(error, dataset, index)) from error
    if not isinstance(given, dict) or "tokens" not in given:
        raise UserError(f"{name}[{index}] is not a dict with 'tokens'; return a dict {{'tokens': integers [seq], ...}}")
    if unknown := given.keys() - {*TOKEN_KEYS, *layout.fields}:
        declared = f", and the declared {', '.join(layout.fields)}" if layout.fields else ""
        raise UserError(
            f"{name}[{index}] has the unknown key {sorted(unknown)[0]!r}; use tokens and optionally labels, weight, "
            f"positions and segments{declared}, or declare the key in the objective's `fields`"
        )
    if missing := layout.fields.keys() - given.keys():
        raise UserError(
            f"{name}[{index}] has no {sorted(missing)[0]!r}, which the objective declares in `fields`; add this key"
        )
    return {key: _without_torch(value) for key, value in given.items()}


def _without_torch(value: Any) -> Any:
    """Returns what NumPy can read: a tensor without gradient, in a dtype that NumPy knows; other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.detach().float() if value.dtype == torch.bfloat16 else value.detach()
    return value


def _convert_together(given: Sequence[Mapping[str, Any]], layout: Layout) -> Arrays | None:
    """Returns `_convert` of all samples, stacked; None if one is invalid, or keys, dtypes or shapes differ."""
    try:
        columns = {key: [np.asarray(one[key]) for one in given if key in one] for key in given[0]}
        alike = all(one.keys() == columns.keys() for one in given)
        if not alike or any(len({(each.dtype, each.shape) for each in column}) > 1 for column in columns.values()):
            return None
        stacked = {key: np.stack(column) for key, column in columns.items()}
        return _convert(stacked, layout, (len(given), *layout.lead))
    except (TypeError, ValueError):
        return None  # one by one, the message names the sample


def _convert_sample(name: str, given: Mapping[str, Any], layout: Layout) -> Arrays:
    """Returns `_convert` of one sample, whose `name` begins the message of an error."""
    try:
        return _convert(given, layout, layout.lead)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is not a valid sample: {error}") from None


def _convert(given: Mapping[str, Any], layout: Layout, lead: tuple[int, ...]) -> Arrays:
    """Returns the arrays `[*lead, ...]` of samples: see `with_defaults`, and the layout's fields."""
    arrays = with_defaults(given, lead)
    for key, declared_field in layout.fields.items():
        try:
            arrays[key] = declared_field.convert(given[key], arrays["tokens"].shape[-1], lead)
            declared_field.check_documents(arrays[key], arrays.get("segments"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} {error}") from None
    return arrays


def with_defaults(given: Mapping[str, Any], lead: tuple[int, ...]) -> Arrays:
    """Returns arrays `[*lead, seq]` for all `TOKEN_KEYS`, with default values for missing keys except `segments`.

    Args:
        given: the sample that the dataset returned.

    Raises:
        ValueError: an array has the wrong dtype or shape, or an invalid value.
    """
    tokens = np.asarray(given["tokens"])
    if tokens.ndim == 0 or tokens.shape[:-1] != lead or tokens.dtype.kind not in "iu" or tokens.size == 0:
        raise ValueError(f"tokens must be integers of shape [{''.join(f'{size}, ' for size in lead)}seq]")
    positions = np.broadcast_to(np.arange(tokens.shape[-1]), tokens.shape)
    sample = {"tokens": tokens, "labels": np.roll(tokens, -1, axis=-1), "positions": positions}
    sample |= {key: np.asarray(given[key]) for key in TOKEN_KEYS if key in given and key != "weight"}
    for key, array in sample.items():
        if array.dtype.kind not in "iu":
            raise ValueError(f"{key} must be integers, but their dtype is {array.dtype}")
    sample = {key: array.astype(np.int64) for key, array in sample.items()}
    sample["weight"] = np.array(given.get("weight", np.ones(tokens.shape)), np.float32)
    for key, array in sample.items():
        if array.shape != tokens.shape:
            raise ValueError(f"{key} has shape {array.shape}, but tokens has {tokens.shape}")
    if "weight" in given and not ((sample["weight"] >= 0) & (sample["weight"] < np.inf)).all():
        raise ValueError("every weight must be 0 or more, and finite")
    if "positions" in given and (sample["positions"] < 0).any():
        raise ValueError("every position must be 0 or more")
    if "segments" in sample:
        sample["segments"] = index_documents(sample["segments"])
    lowest = sample["tokens"].min()
    if "labels" in given:
        ignored = sample["labels"] == IGNORED
        sample["weight"][ignored] = sample["labels"][ignored] = 0
        lowest = min(lowest, sample["labels"].min())
    else:
        sample["weight"][..., -1] = 0  # the token after the last one is unknown
    if lowest < 0:
        raise ValueError(f"{lowest} is neither a token id nor {IGNORED} (which marks a label without loss)")
    return sample


def index_documents(segments: np.ndarray) -> np.ndarray:
    """Returns the index of each token's document in its sequence, `[..., seq]`: 0, then 1 more for each next document.

    A document is a run of equal `segments` `[..., seq]`.
    """
    steps = np.diff(segments)
    return np.concatenate([np.zeros_like(segments[..., :1]), (steps != 0).cumsum(-1)], -1)


def _describe_error(error: BaseException, dataset: Dataset, index: int) -> tuple[str, str, int | None]:
    """Returns the message, file and line of a UserError for the exception that a dataset raised for sample `index`."""
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
