"""Defines `rewrite_checkpoint`, which writes a checkpoint again as the checkpoint of a single rank."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.load import tokenizer_folder
from weft.checkpoint.shard_files import write_checkpoint
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.checkpoint.weights import checkpoint_tensors
from weft.files import read_json, refuse_existing
from weft.models.huggingface_weights import saved_dtype
from weft.observe.console import Console

CONTENTS = (files.MODEL, files.OPTIMIZER, files.STATE, files.ADAPTER, files.ORIGIN)


def rewrite_checkpoint(checkpoint: Path, out: Path, dtype: torch.dtype | None, console: Console) -> tuple[int, int]:
    """Writes all tensors and values of a checkpoint to the folder `out`, with unsharded tensors, one at a time.

    Args:
        checkpoint: a path that `resolve` returned, so the files are undamaged.
        dtype: dtype of the model's weights; None: as saved. The optimizer state keeps its dtypes.

    Returns:
        The numbers of tensors and of files with tensors.

    Raises:
        UserError: `out` exists or cannot be written.
    """
    refuse_existing(out)
    entries = []
    for name, saved in checkpoint_tensors(checkpoint, ""):
        is_weight = name.startswith(MODEL_PREFIX)
        chosen = saved_dtype(name.removeprefix(MODEL_PREFIX), dtype, saved.dtype) if is_weight else saved.dtype
        entries.append(Entry(name, chosen, saved.shape, saved.blocks))
    contents = {name: read_json(checkpoint / name) for name in CONTENTS if (checkpoint / name).is_file()}
    tied, tokenizer = read_json(checkpoint / files.INDEX)["tied"], tokenizer_folder(checkpoint)
    return len(entries), write_checkpoint(out, entries, contents, tokenizer, [], "converting", console, tied=tied)
