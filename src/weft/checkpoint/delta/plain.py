"""Deltas of floats, as FastChat's `apply_delta` takes them: a Hugging Face folder to be added to another one.

They are rounded, carry no digests, and so can be neither exact nor checked; `weft delta make` writes the other kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from weft.checkpoint.delta.make import copy_beside
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.shard_files import SHARD_BYTES, named_shards, new_folder, write_shards
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.weights import Saved, Weights, open_weights
from weft.errors import UserError
from weft.families.config_json import INDEX, is_huggingface
from weft.formatting import first_few
from weft.observe.console import Console

# What older versions of transformers saved beside the weights; one side may have it alone.
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
    """Add the tensors of two models in float32 (float64 if they are that), in the delta's dtypes.

    `out` is a Hugging Face folder with the delta's config and tokenizer.

    Returns:
        Numbers of tensors and of their bytes.

    Raises:
        UserError: they have not the same tensors (each is named), or `out` cannot be made.
    """
    delta, out, console = Path(delta), Path(out), console or Console(speaks=False)
    if not is_huggingface(delta):
        raise UserError(
            "this is no delta: there is no delta.json here, as `weft delta make` writes it, and it is no Hugging Face "
            "folder of plain differences",
            delta,
        )
    more = open_weights(delta, allow_pickle=allow_pickle)
    start = open_weights(base, huggingface=True, allow_pickle=allow_pickle)
    _compare(start, more)
    entries = [
        Entry(name, saved.dtype, saved.shape, partial(_sum, start.tensors[name], saved))
        for name, saved in more.tensors.items()
    ]
    needed = sum(entry.bytes for entry in entries)
    with new_folder(out, needed) as made, console.progress(needed, "adding", unit="B") as progress:
        console.warning(
            f"{delta}: plain differences, without digests: whether {base} is the right base cannot be told, and sums "
            "are rounded"
        )
        copy_beside(more, made)
        (made / INDEX).unlink(missing_ok=True)
        write_shards(made, named_shards(entries, SHARD_BYTES), progress)
    pickled.forget()
    return len(entries), needed


def _compare(base: Weights, delta: Weights) -> None:
    """Both have the same tensors, but for buffers."""
    problems = []
    for name, saved in delta.tensors.items():
        there = base.tensors.get(name)
        if there is None:
            problems.append(f"{name} is not in the base")
        elif there.shape != saved.shape:
            rows = there.shape[1:] == saved.shape[1:] and there.shape[0] < saved.shape[0]
            hint = f" (`weft resize` with --vocab-size {saved.shape[0]} gives the base as many rows)" if rows else ""
            problems.append(f"{name} is {list(saved.shape)} and {list(there.shape)} in the base{hint}")
    left = [name for name in base.tensors if name not in delta.tensors and not _BUFFERS.search(name)]
    problems += [f"{name} is in the base alone" for name in left]
    if problems:
        raise UserError(f"this does not fit {base.path}: {first_few(problems, _NAMED, '; ')}", delta.path)


def _sum(base: Saved, delta: Saved) -> Iterator[torch.Tensor]:
    rows = delta.rows
    for one, other in zip(base.blocks(rows), delta.blocks(rows), strict=True):
        wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
        yield (one.to(wide) + other.to(wide)).to(delta.dtype)
