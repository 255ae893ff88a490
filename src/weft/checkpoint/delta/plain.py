"""Floating-point deltas as used by FastChat's `apply_delta`: a Hugging Face folder that is added to another one.

They are rounded and have no digests, so they are not exact and cannot be verified. `weft delta make` writes exact ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from weft.checkpoint.delta.make import copy_other_files
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.shard_files import SHARD_BYTES, new_huggingface_folder, split_into_shards
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.weights import SavedTensor, Weights, open_weights
from weft.errors import UserError
from weft.families.config_json import INDEX, is_huggingface
from weft.formatting import first_few
from weft.observe.console import Console

# Buffers that older versions of transformers saved with the weights; the base may have them without the delta.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$|\.position_ids$")
_NAMED = 4


def apply_plain(
    base: str | Path,
    delta: str | Path,
    out: str | Path,
    *,
    allow_pickle: bool = False,
    console: Console | None = None,
) -> tuple[int, int]:
    """Adds the tensors of two models in float32 (in float64 if one is float64) and casts to the delta's dtypes.

    `out` becomes a Hugging Face folder with the delta's config and tokenizer.

    Returns:
        The number of tensors, and of their bytes.

    Raises:
        UserError: the tensors do not match (each is named), or `out` cannot be written.
    """
    delta, out, console = Path(delta), Path(out), console or Console(speaks=False)
    if not is_huggingface(delta):
        raise UserError(
            "not a delta: neither a delta.json, as `weft delta make` writes, nor a Hugging Face folder of plain "
            "differences; give one of these",
            delta,
        )
    differences = open_weights(delta, allow_pickle=allow_pickle)
    start = open_weights(base, huggingface=True, allow_pickle=allow_pickle)
    _check_base(start, differences)
    entries = [
        Entry(name, saved.dtype, saved.shape, partial(_sum, start.tensors[name], saved))
        for name, saved in differences.tensors.items()
    ]
    warning = (
        f"{delta}: plain differences, without digests: whether {base} is the right base cannot be verified, and sums "
        "are rounded"
    )
    shards = split_into_shards(entries, SHARD_BYTES)
    with new_huggingface_folder(out, shards, "adding", console, [warning]) as folder:
        copy_other_files(differences, folder)
        (folder / INDEX).unlink(missing_ok=True)
    pickled.release()
    return len(entries), sum(entry.bytes for entry in entries)


def _check_base(base: Weights, delta: Weights) -> None:
    """Raises UserError if the tensors differ, except for buffers."""
    problems = []
    for name, saved in delta.tensors.items():
        found = base.tensors.get(name)
        if found is None:
            problems.append(f"{name} is not in the base")
        elif found.shape != saved.shape:
            rows = found.shape[1:] == saved.shape[1:] and found.shape[0] < saved.shape[0]
            hint = f" (`weft resize` with --vocab-size {saved.shape[0]} gives the base as many rows)" if rows else ""
            problems.append(f"{name} is {list(saved.shape)} and {list(found.shape)} in the base{hint}")
    left = [name for name in base.tensors if name not in delta.tensors and not _BUFFERS.search(name)]
    problems += [f"{name} is only in the base" for name in left]
    if problems:
        raise UserError(f"the delta does not fit {base.path}: {first_few(problems, _NAMED, '; ')}", delta.path)


def _sum(base: SavedTensor, delta: SavedTensor) -> Iterator[torch.Tensor]:
    for one, other in zip(base.blocks(delta.rows), delta.blocks(), strict=True):
        wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
        yield (one.to(wide) + other.to(wide)).to(delta.dtype)
