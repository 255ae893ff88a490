"""Export to Hugging Face: a folder that AutoModelForCausalLM and AutoTokenizer load, streamed tensor by tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.config_files import (
    SPECIAL,
    copy_tokenizer_beside,
    origin_of,
    special_ids,
    tokenizer_doubts,
)
from weft.checkpoint.huggingface.folder import groups
from weft.checkpoint.huggingface.import_model import Made, dtype_of
from weft.checkpoint.huggingface.transformers_files import transformers_documents, transformers_entries
from weft.checkpoint.load import tokenizer_folder
from weft.checkpoint.load_model import architecture
from weft.checkpoint.shard_files import SHARD_BYTES, named_shards, new_folder, write_shards
from weft.checkpoint.tensor_file import Entry, main_dtype
from weft.checkpoint.weights import open_weights, their_tensors
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families.config_json import CONFIG
from weft.families.mapping import keep_activation_names
from weft.models.huggingface_weights import saved_dtype, to_config_json
from weft.observe.console import Console

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(
    source: Path,
    out: Path,
    console: Console,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = SHARD_BYTES,
) -> Made:
    """Write config.json, safetensors and tokenizer files.

    Sharded checkpoints are put together one tensor at a time. `out` appears whole, by one rename, or not at all.

    Args:
        dtype: of the weights; default: each as it was saved.
        max_shard_size: of one file, in bytes or as "5GB" (a tensor is never divided).

    Raises:
        UserError: a damaged checkpoint, or a model that no family of Hugging Face's can be.
    """
    kind, limit = dtype_of(dtype), _size_of(max_shard_size)
    section, tokenizer = architecture(source), tokenizer_folder(source)
    weights = open_weights(source, huggingface=False)
    if isinstance(section, TransformersModelSection):
        kinds = {name: kind or saved.dtype for name, saved in weights.tensors.items()}
        entries = transformers_entries(section, kinds, lambda name: weights.tensors[name].whole())
        documents = transformers_documents(section, entries)
    elif isinstance(section, ModelSection):
        theirs = their_tensors(source, section, weights.tensors)
        names = {name: parts[0][0] for name, parts in groups(section).items()}
        entries = [
            Entry(name, saved_dtype(names[name], kind, saved.dtype), saved.shape, saved.whole)
            for name, saved in theirs.items()
        ]
        documents = _documents(source, section, tokenizer, entries)
    else:
        raise UserError(
            f"a model of your own ({section.type}) is none that transformers knows; only the built-in decoder and "
            "type: hf can be exported",
            source / files.MODEL,
        )
    needed = sum(entry.bytes for entry in entries)
    doubts = [*weights.notes, *tokenizer_doubts(tokenizer, section, documents[CONFIG])]
    with new_folder(out, needed) as made, console.progress(needed, "exporting", unit="B") as progress:
        for doubt in doubts:
            console.warning(f"{source}: {doubt}")
        shards = named_shards(entries, limit)
        write_shards(made, shards, progress)
        for name, content in documents.items():
            files.write_json(made / name, content)
        if tokenizer is not None:
            copy_tokenizer_beside(tokenizer, made)
    return Made(section, len(entries), len(shards), needed)


def _documents(
    source: Path, section: ModelSection, tokenizer: Path | None, entries: list[Entry]
) -> dict[str, dict[str, Any]]:
    """config.json and generation_config.json."""
    try:
        config = to_config_json(section)
    except UserError as error:
        raise UserError(error.what, source / files.MODEL) from None
    origin = origin_of(source)
    if origin:
        special = {key: origin["config"][key] for key in SPECIAL if key in origin["config"]}
        config = keep_activation_names(config, origin["config"])
    else:
        special = special_ids(tokenizer, section)
        if section.pad_token_id is not None:
            special["pad_token_id"] = section.pad_token_id
    kind = main_dtype(entries)
    generation = origin.get("generation_config") or {key: id for key, id in special.items() if id is not None}
    return {CONFIG: config | special | {"dtype": kind, "torch_dtype": kind}, "generation_config.json": generation}


def _size_of(size: str | int) -> int:
    """Bytes of `5GB`, `500 MB`, `2GiB` or a plain number. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(size).strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
        raise UserError(f"--max-shard-size {size}: no size; write it as 5GB or 500MB")
    return max(1, int(float(match[1]) * UNITS[match[2].upper()]))
