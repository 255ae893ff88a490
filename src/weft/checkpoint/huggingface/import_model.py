"""A Hugging Face folder -> a checkpoint as a run saves it, streamed tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.huggingface.config_files import origin_of, tokenizer_doubts
from weft.checkpoint.huggingface.folder import HuggingFaceFolder, open_folder
from weft.checkpoint.new_checkpoint import write_checkpoint
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.formatting import amount, counted
from weft.models.huggingface_weights import saved_dtype
from weft.observe.console import Console

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Made:
    """What was written: the model, and how many tensors and bytes in how many files."""

    section: ModelSection | TransformersModelSection
    tensors: int
    files: int
    bytes: int

    def __str__(self) -> str:
        written = f"{counted(self.tensors, 'tensor')}, {counted(self.bytes, 'byte')} in {counted(self.files, 'file')}"
        if isinstance(self.section, TransformersModelSection):
            return f"{self.section.architecture}, {written}"
        return f"{self.section.family}, {amount(self.section.size().parameters)} parameters in {written}"


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype of weights by its name. Raises UserError for another."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: give one of {', '.join(DTYPES)}")
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    allow_pickle: bool = False,
    console: Console | None = None,
) -> Made:
    """Make a checkpoint of a Hugging Face folder: what `load_model`, `generate` and `model: {from: OUT}` take.

    >>> made = weft.import_model("hf", "imported", dtype="bfloat16")
    >>> made.section.family
    'llama'

    Args:
        source: a folder with config.json, safetensors and the tokenizer, as `save_pretrained` makes it.
        out: the folder to make. It appears whole, by one rename, or not at all.
        dtype: of the weights, "bfloat16" for one; default: each as it was saved.
        allow_pickle: take `.bin` files too where there is no safetensors file; tensors are read and nothing else.
        console: where to warn and show progress; default: nowhere.

    Returns:
        The numbers `tensors`, `files` and `bytes`, and the model's `section`.

    Raises:
        UserError: the folder is not whole, of an unknown architecture, or pickled; or `out` cannot be made.
    """
    source, out, console, kind = Path(source), Path(out), console or Console(speaks=False), dtype_of(dtype)
    folder = open_folder(source, allow_pickle=allow_pickle)
    doubts = [*folder.notes, *tokenizer_doubts(source, folder.section, folder.config)]
    doubts = [f"{source}: {doubt}" for doubt in doubts]
    entries = [_entry(folder, name, kind) for name in folder.sources]
    documents = {files.MODEL: folder.section.model_dump(mode="json", by_alias=True), files.ORIGIN: origin_of(source)}
    tokenizer = source if (source / "tokenizer.json").is_file() else None
    made = write_checkpoint(out, entries, documents, tokenizer, doubts, "importing", console)
    pickled.forget()
    return Made(folder.section, len(entries), made, sum(entry.bytes for entry in entries))


def _entry(folder: HuggingFaceFolder, name: str, dtype: torch.dtype | None) -> Entry:
    return Entry(
        MODEL_PREFIX + name,
        saved_dtype(name, dtype, folder.dtype(name)),
        folder.sources[name].shape,
        partial(folder.pieces, name),
    )
