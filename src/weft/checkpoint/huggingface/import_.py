"""A Hugging Face folder -> a checkpoint as a run saves it, streamed tensor by tensor."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import files
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.huggingface.folder import HuggingFaceFolder, open_folder
from weft.checkpoint.huggingface.making import new_folder, tokenizer_doubts
from weft.checkpoint.storage import FILE_BYTES
from weft.checkpoint.tensor_file import Entry, cut, dtype_name, write_safetensors
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.config.headers import copy_tokenizer, read_json
from weft.config.model import ModelSection
from weft.observe.console import Console


@dataclass(frozen=True)
class Made:
    """What was written: the model, and how many tensors and bytes in how many files."""

    section: ModelSection
    tensors: int
    files: int
    bytes: int


def import_folder(
    source: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    console: Console | None = None,
) -> Made:
    """Make of a Hugging Face folder what `load_model`, `weft generate` and `model.from` take like a run's checkpoint.

    `out` appears whole, by one rename, or not at all.

    Args:
        dtype: of the weights; default: each as it was saved.
        allow_pickle: take `.bin` files too where there is no safetensors file; tensors are read and nothing else.
        console: where to warn and show progress; default: nowhere.

    Raises:
        UserError: the folder is not whole, of an unknown architecture, or pickled; or `out` cannot be made.
    """
    source, out, console = Path(source), Path(out), console or Console(speaks=False)
    folder = open_folder(source, allow_pickle=allow_pickle)
    doubts = tokenizer_doubts(source, folder.section, folder.config)
    entries = [_entry(folder, name, dtype) for name in folder.sources]
    needed = sum(entry.bytes for entry in entries)
    with new_folder(out, needed) as made, console.progress(needed, "importing", unit="B") as progress:
        for doubt in doubts:
            console.warning(f"{source}: {doubt}")
        groups = cut(entries, FILE_BYTES)
        names = [f"shard-00001-model-{n + 1:05d}-of-{len(groups):05d}.safetensors" for n in range(len(groups))]
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress.update(min(done, needed))

        with ThreadPoolExecutor(min(4, files.threads())) as pool:
            write = partial(_write, made, on_bytes=on_bytes)
            digests = dict(zip(names, pool.map(write, names, groups), strict=True))
        digests |= _documents(made, folder, names, groups)
        files.write_checksums(made, digests)
        if (source / "tokenizer.json").is_file():
            copy_tokenizer(source, made / "tokenizer")
    pickled.forget()
    return Made(folder.section, len(entries), len(groups), needed)


def _entry(folder: HuggingFaceFolder, name: str, dtype: torch.dtype | None) -> Entry:
    return Entry(
        MODEL_PREFIX + name, dtype or folder.dtype(name), folder.sources[name].shape, partial(folder.read, name)
    )


def _write(made: Path, name: str, entries: list[Entry], *, on_bytes: Any) -> files.Digest:
    # The header of a DCP shard: each tensor is whole in its file.
    offsets = {entry.name: {"saved_offsets": [0] * len(entry.shape)} for entry in entries}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    return write_safetensors(made / name, entries, metadata, on_bytes)


def _documents(
    made: Path, folder: HuggingFaceFolder, names: list[str], groups: list[list[Entry]]
) -> dict[str, files.Digest]:
    """The JSON files of a checkpoint that has made no step."""
    tensors = {
        entry.name: {
            "dtype": dtype_name(entry.dtype),
            "shape": list(entry.shape),
            "pieces": [[number, [0] * len(entry.shape), list(entry.shape)]],
        }
        for number, group in enumerate(groups)
        for entry in group
    }
    index = {"format": "weft checkpoint", "version": 1, "files": names, "tied": {}, "tensors": tensors}
    generation = folder.path / "generation_config.json"
    documents = {
        files.INDEX: index,
        files.MODEL: folder.section.model_dump(mode="json", by_alias=True),
        files.OPTIMIZER: None,
        files.STATE: {"step": 0},
        files.ORIGIN: {
            "config": folder.config,
            "generation_config": read_json(generation) if generation.is_file() else None,
        },
    }
    return {name: files.write_json(made / name, content) for name, content in documents.items()}
