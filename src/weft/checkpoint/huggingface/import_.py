"""A Hugging Face folder -> a checkpoint as a run saves it, streamed tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from weft.checkpoint import files
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.huggingface.folder import HuggingFaceFolder, open_folder
from weft.checkpoint.huggingface.making import tokenizer_doubts
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.checkpoint.writing import write_checkpoint
from weft.config.headers import read_json
from weft.config.model import ModelSection
from weft.models.huggingface import saved_as
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
    doubts = [*folder.notes, *tokenizer_doubts(source, folder.section, folder.config)]
    doubts = [f"{source}: {doubt}" for doubt in doubts]
    entries = [_entry(folder, name, dtype) for name in folder.sources]
    generation = source / "generation_config.json"
    origin = {
        "config": folder.config,
        "generation_config": read_json(generation) if generation.is_file() else None,
    }
    documents = {files.MODEL: folder.section.model_dump(mode="json", by_alias=True), files.ORIGIN: origin}
    tokenizer = source if (source / "tokenizer.json").is_file() else None
    made = write_checkpoint(out, entries, documents, tokenizer, doubts, "importing", console)
    pickled.forget()
    return Made(folder.section, len(entries), made, sum(entry.bytes for entry in entries))


def _entry(folder: HuggingFaceFolder, name: str, dtype: torch.dtype | None) -> Entry:
    return Entry(
        MODEL_PREFIX + name,
        saved_as(name, dtype, folder.dtype(name)),
        folder.sources[name].shape,
        partial(folder.pieces, name),
    )
