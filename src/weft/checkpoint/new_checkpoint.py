"""A checkpoint that has made no step, written tensor by tensor: what importing, resizing and a delta make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.shard_files import in_threads, new_folder
from weft.checkpoint.storage import FILE_BYTES, index_of, write_shard
from weft.checkpoint.tensor_file import Entry, cut
from weft.data.tokenizers.copy import copy_tokenizer
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
        paths = [made / f"shard-00001-model-{n + 1:05d}-of-{len(groups):05d}.safetensors" for n in range(len(groups))]
        written = in_threads(write_shard, paths, groups, progress=progress, total=needed)
        tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        index = index_of([piece for _, pieces in written for piece in pieces], tensors, {})
        contents = {files.INDEX: index, files.OPTIMIZER: None, files.STATE: {"step": 0}} | documents
        digests = {path.name: digest for path, (digest, _) in zip(paths, written, strict=True)}
        digests |= {name: files.write_json(made / name, content) for name, content in contents.items()}
        files.write_checksums(made, digests)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, made / "tokenizer")
    return len(groups)
