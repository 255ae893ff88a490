"""Converts the batches that a user's own loop passes to `Trainer.step` to `Batch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from weft.data.batches.batch import Batch
from weft.data.batches.layout import TOKEN_KEYS, Layout
from weft.data.batches.samples import IGNORED, UNPAIRED, Arrays, first_invalid_id, with_defaults
from weft.errors import UserError

ALIGNED = "input_ids"  # in place of tokens, as in Transformers, where a label belongs to the token at its own position
MASK = "attention_mask"


def batch_from(given: Mapping[str, Any] | Batch, layout: Layout) -> Batch:
    """Converts a dict of CPU tensors or arrays to a `Batch`.

    The keys are:

    - `tokens`, int `[batch, seq]`, with optional `labels`: the token to predict at each position, which is the token
      after it. Or `input_ids` as in Transformers, where `labels` are those of the same positions.
    - optional `labels` (default: the next token of the same document; -100 has no loss), `weight` (default: 1),
      `segments` and `positions` (default: from 0 in each document).
    - optional `attention_mask`, 1 for tokens and 0 for padding on the right or left. Padding has no loss, and no token
      attends to it.
    - the fields of the layout, each `[batch, ...]`.

    If a sample has several sequences, these can be adjacent sequences of the batch, or the second dimension.

    Args:
        given: the dict. A `Batch` is only checked; its labels of -100 get weight 0, in a copy.
        layout: fields and number of sequences per sample that the objective declares.

    Raises:
        UserError: a key is missing or unknown, or a value has the wrong device, dtype or shape, or is invalid.
    """
    batch = _check_batch(given, layout) if isinstance(given, Batch) else _converted(given, layout)
    if (row := batch.unpaired_row()) is not None:
        raise UserError(f"the batch is not valid: sequence {row} {UNPAIRED}")
    return batch.weigh_documents() if layout.weigh_documents else batch


def _converted(given: Mapping[str, Any], layout: Layout) -> Batch:
    try:
        return _convert({key: value for key, value in given.items() if value is not None}, layout)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the batch is not valid: {error}") from None


def _check_batch(batch: Batch, layout: Layout) -> Batch:
    if batch.extra.keys() != layout.fields.keys() or batch.layout.sequences != layout.sequences:
        raise UserError(
            f"the Batch has the fields {sorted(batch.extra)} and {batch.layout.sequences} sequences per sample, but "
            f"the objective declares {sorted(layout.fields)} and {layout.sequences}; make the Batch for this objective"
        )
    if batch.tokens.device.type != "cpu":
        raise UserError(f"the Batch is on {batch.tokens.device}; pass it on the CPU, Weft moves each micro-batch")
    copies = {key: getattr(batch, key).clone() for key in ("labels", "weight")}
    _check_ids({"tokens": batch.tokens.numpy()} | {key: copy.numpy() for key, copy in copies.items()}, layout)
    return replace(batch, **copies)


def _convert(given: Mapping[str, Any], layout: Layout) -> Batch:
    _check_keys(given, layout)
    arrays = {key: _array(key, value) for key, value in given.items() if key not in layout.fields}
    name = ALIGNED if ALIGNED in arrays else "tokens"
    arrays["tokens"] = tokens = arrays.pop(name)
    lead, sequences = tokens.shape[:-1], layout.sequences
    if len(lead) not in (1, 1 + len(layout.lead)) or tokens.size == 0:
        pairs = f", or [samples, {sequences}, seq]" if sequences > 1 else ""
        raise ValueError(f"{name} must be integers of shape [batch, seq]{pairs}, but its shape is {tokens.shape}")
    if (lead[0] % sequences) if len(lead) == 1 else (lead[1] != sequences):
        raise ValueError(f"{name} has shape {tokens.shape}, but a sample of the objective has {sequences} sequences")
    for key in (MASK, "labels"):
        if key in arrays and arrays[key].shape != tokens.shape:
            raise ValueError(f"{key} has shape {arrays[key].shape}, but {name} has {tokens.shape}")
    mask = _mask(arrays.pop(MASK)) if MASK in arrays else None
    learned = _labels(arrays, name, mask)
    if mask is not None and "segments" not in arrays and not (mask if layout.separate_padding else mask[..., 0]).all():
        # Without `separate_padding` only for padding on the left: causal attention ignores padding on the right.
        arrays["segments"] = mask.astype(np.int64)
    found = with_defaults(arrays, lead)
    if learned is not None:
        found["weight"][~learned] = 0
    if "segments" in arrays:
        _separate(found, given)
    _check_ids(found, layout)
    extra = {key: _field(key, given[key], layout, found) for key in layout.fields}
    tensors = {
        key: torch.from_numpy(array.reshape(-1, *array.shape[len(lead) :])) for key, array in (found | extra).items()
    }
    extra = {key: tensors.pop(key) for key in layout.fields}
    numbers = torch.arange(len(tensors["tokens"]) // sequences).repeat_interleave(sequences)
    return Batch(**{"segments": None, **tensors}, samples=numbers, extra=extra, layout=layout)


def _check_keys(given: Mapping[str, Any], layout: Layout) -> None:
    known = [*TOKEN_KEYS, ALIGNED, MASK, *layout.fields]
    if ("tokens" in given) == (ALIGNED in given):
        both = "both tokens and input_ids" if "tokens" in given else "neither tokens nor input_ids"
        raise UserError(f"the batch has {both}; pass one of the two")
    if unknown := [str(key) for key in given if key not in known]:
        raise UserError(
            f"the batch has the unknown key {unknown[0]!r}; pass {', '.join(known)} only, or declare the key in the "
            "objective's `fields`"
        )
    if missing := [key for key in layout.fields if key not in given]:
        raise UserError(f"the batch has no {missing[0]!r}, which the objective declares in `fields`; add this key")


def _array(key: str, value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"{key} is on {value.device}; pass CPU tensors, Weft moves each micro-batch to the device")
        value = value.detach()
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key} cannot be converted to an array ({error})") from None


def _field(key: str, value: Any, layout: Layout, found: Arrays) -> np.ndarray:
    *lead, seq = found["tokens"].shape
    try:
        array = layout.fields[key].convert(_array(key, value), seq, tuple(lead))
        layout.fields[key].check_documents(array, found.get("segments"))
        return array
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key} {error}") from None


def _mask(mask: np.ndarray) -> np.ndarray:
    """Returns an attention mask as bool.

    Raises:
        ValueError: the mask has other values than 0 and 1, or a sequence with padding between its tokens.
    """
    if mask.dtype.kind not in "biuf" or not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{MASK} must be 1 for tokens and 0 for padding")
    mask = mask.astype(bool)
    runs = mask[..., 0].astype(np.int64) + (mask[..., 1:] & ~mask[..., :-1]).sum(-1)
    if (runs > 1).any():
        where = np.argwhere(runs > 1)[0].tolist()
        raise ValueError(
            f"{MASK} of sequence {where[0]} has padding between tokens; separate documents with `segments`, and "
            "exclude tokens from the loss with `weight` or labels of -100"
        )
    return mask


def _labels(arrays: Arrays, name: str, mask: np.ndarray | None) -> np.ndarray | None:
    """Replaces labels by those of the next token. Returns where the mask allows a loss; None without a mask."""
    tokens, labels = arrays["tokens"], arrays.get("labels")
    if labels is not None:
        learned = labels != IGNORED
        same = (labels == tokens)[learned].all()
        following = (labels[..., :-1] == tokens[..., 1:])[learned[..., :-1]].all()
        if name == "tokens" and same and not following:
            raise ValueError(
                "the labels are the tokens at the same positions; with `tokens`, labels are the next tokens: rename "
                "tokens to input_ids, whose labels are shifted as in Transformers, or leave the labels out"
            )
        if name == ALIGNED and following and not same:
            raise ValueError(
                "the labels are the next tokens already; with `input_ids`, labels are shifted as in Transformers: "
                "rename input_ids to tokens"
            )
    if mask is None:
        allowed = None
    elif name == "tokens" and labels is not None:
        allowed = mask
    else:
        allowed = mask & np.concatenate([mask[..., 1:], np.zeros_like(mask[..., :1])], -1)
    if name == ALIGNED and labels is not None:
        arrays["labels"] = np.concatenate([labels[..., 1:], np.full_like(labels[..., :1], IGNORED)], -1)
    return allowed


def _separate(arrays: Arrays, given: Mapping[str, Any]) -> None:
    """Lets positions restart in each document, and excludes labels that are in the next document, unless given."""
    segments = arrays["segments"]
    begins = np.ones(segments.shape, bool)
    begins[..., 1:] = segments[..., 1:] != segments[..., :-1]
    if "positions" not in given:
        index = np.broadcast_to(np.arange(segments.shape[-1]), segments.shape)
        arrays["positions"] = index - np.maximum.accumulate(np.where(begins, index, 0), -1)
    if "labels" not in given:
        arrays["weight"][..., :-1][begins[..., 1:]] = 0


def _check_ids(arrays: Arrays, layout: Layout) -> None:
    if (found := first_invalid_id(arrays, layout)) is not None:
        place, what, allowed = found
        raise UserError(f"the batch has {what}, sequence {place[0]}; {allowed}")
