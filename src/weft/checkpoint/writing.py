"""A checkpoint that has made no step, written tensor by tensor: what importing, resizing and a delta make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint import files
from weft.checkpoint.huggingface.making import in_threads, new_folder
from weft.checkpoint.storage import FILE_BYTES
from weft.checkpoint.tensor_file import Entry, cut, dtype_name, write_safetensors
from weft.config.headers import copy_tokenizer
from weft.observe.console import Console


def write_checkpoint(
    out: Path,
    entries: Sequence[Entry],
    documents: dict[str, Any],
    tokenizer: Path | None,
    doubts: Sequence[str],
    doing: str,
    console: Console,
) -> int:
    """Make the folder `out`, which appears whole, by one rename, or not at all.

    Args:
        entries: the model's tensors, by the names that a checkpoint has for them.
        documents: its JSON files: model.json, and others.
        tokenizer: whose folder to put beside them.
        doubts: what to warn of once `out` is known to be possible.
        doing: what progress is called.

    Returns:
        The number of files with tensors.

    Raises:
        UserError: `out` cannot be made; or what reading an entry raises.
    """
    needed = sum(entry.bytes for entry in entries)
    with new_folder(out, needed) as made, console.progress(needed, doing, unit="B") as progress:
        for doubt in doubts:
            console.warning(doubt)
        groups = cut(entries, FILE_BYTES)
        names = [f"shard-00001-model-{n + 1:05d}-of-{len(groups):05d}.safetensors" for n in range(len(groups))]
        written = in_threads(partial(_write, made), names, groups, progress=progress, total=needed)
        digests = dict(zip(names, written, strict=True))
        contents = {
            files.INDEX: _index(names, groups),
            files.OPTIMIZER: None,
            files.STATE: {"step": 0},
        } | documents
        digests |= {name: files.write_json(made / name, content) for name, content in contents.items()}
        files.write_checksums(made, digests)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, made / "tokenizer")
    return len(groups)


def _write(made: Path, name: str, entries: list[Entry], on_bytes: Any) -> files.Digest:
    # The header of a DCP shard: each tensor is whole in its file.
    offsets = {entry.name: {"saved_offsets": [0] * len(entry.shape)} for entry in entries}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    return write_safetensors(made / name, entries, metadata, on_bytes)


def _index(names: list[str], groups: list[list[Entry]]) -> dict[str, Any]:
    tensors = {
        entry.name: {
            "dtype": dtype_name(entry.dtype),
            "shape": list(entry.shape),
            "pieces": [[number, [0] * len(entry.shape), list(entry.shape)]],
        }
        for number, group in enumerate(groups)
        for entry in group
    }
    return {"format": "weft checkpoint", "version": 1, "files": names, "tied": {}, "tensors": tensors}
