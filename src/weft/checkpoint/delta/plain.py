"""Applies plain (floating-point) differences, as FastChat's `apply_delta` does: adds the tensors of two folders.

Plain differences are rounded and have no digests, so the result is not exact and cannot be verified. The deltas of
`weft delta make` are exact.
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

# Buffers that older versions of transformers saved with the weights. The base can have buffers that the delta lacks.
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$|\.position_ids$")
_NAMED = 4


@pickled.released()
def apply_plain(
    base: str | Path,
    delta: str | Path,
    out: str | Path,
    *,
    allow_pickle: bool = False,
    console: Console | None = None,
) -> tuple[int, int]:
    """Adds plain differences to the tensors of a base, and writes a Hugging Face folder.

    The sums are computed in float32 (in float64 if a tensor is float64) and cast to the dtypes of the delta. The
    folder gets the delta's config and tokenizer.

    Args:
        delta: a Hugging Face folder with the differences.
        out: the folder to write.
        allow_pickle: whether to read `.bin` files of a folder that has no safetensors files.

    Returns:
        The number of tensors, and their total size in bytes.

    Raises:
        UserError: names or shapes of the tensors do not match, or `out` cannot be written.
    """
    delta, out, console = Path(delta), Path(out), console or Console(prints=False)
    if not is_huggingface(delta):
        raise UserError(
            "not a delta; give a folder that `weft delta make` wrote (with delta.json), or a Hugging Face folder of "
            "plain differences",
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
        f"{delta}: plain differences have no digests: Weft cannot verify that {base} is the right base, and the sums "
        "are rounded"
    )
    shards = split_into_shards(entries, SHARD_BYTES)
    with new_huggingface_folder(out, shards, "adding", console, [warning]) as folder:
        copy_other_files(differences, folder)
        (folder / INDEX).unlink(missing_ok=True)
    return len(entries), sum(entry.bytes for entry in entries)


def _check_base(base: Weights, delta: Weights) -> None:
    """Checks that base and delta have tensors of equal names and shapes, except buffers. Raises UserError otherwise."""
    problems = []
    for name, saved in delta.tensors.items():
        found = base.tensors.get(name)
        if found is None:
            problems.append(f"{name} is in the delta, but not in the base")
        elif found.shape != saved.shape:
            rows = found.shape[1:] == saved.shape[1:] and found.shape[0] < saved.shape[0]
            hint = f" (resize the base: `weft resize --vocab-size {saved.shape[0]}`)" if rows else ""
            problems.append(f"{name} is {list(saved.shape)} in the delta, but {list(found.shape)} in the base{hint}")
    left = [name for name in base.tensors if name not in delta.tensors and not _BUFFERS.search(name)]
    problems += [f"{name} is in the base, but not in the delta" for name in left]
    if problems:
        raise UserError(f"the delta does not fit {base.path}: {first_few(problems, _NAMED, '; ')}", delta.path)


def _sum(base: SavedTensor, delta: SavedTensor) -> Iterator[torch.Tensor]:
    for one, other in zip(base.blocks(delta.rows), delta.blocks(), strict=True):
        wide = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
        yield (one.to(wide) + other.to(wide)).to(delta.dtype)
