"""`weft.import_model`, which converts a Hugging Face folder or a GGUF file to a checkpoint, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.distributed.open_distributed import (
    DistributedModel,
    distributed_checkpoint,
    open_distributed,
)
from weft.checkpoint.huggingface import pickled
from weft.checkpoint.huggingface.config_files import read_origin, tokenizer_warnings
from weft.checkpoint.huggingface.folder import open_folder
from weft.checkpoint.huggingface.import_gguf import import_gguf, is_gguf
from weft.checkpoint.shard_files import write_checkpoint
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.formatting import amount, counted
from weft.models.huggingface_weights import saved_dtype
from weft.observe.console import Console

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class WrittenModel:
    """A model that was imported or exported: its model section, and its numbers of tensors, files and bytes."""

    section: ModelSection | TransformersModelSection | CustomModelSection
    tensors: int
    files: int
    bytes: int

    def __str__(self) -> str:
        written = f"{counted(self.tensors, 'tensor')}, {counted(self.bytes, 'byte')} in {counted(self.files, 'file')}"
        if isinstance(self.section, TransformersModelSection):
            return f"{self.section.architecture}, {written}"
        if isinstance(self.section, CustomModelSection):
            return f"{self.section.type}, {written}"
        return f"{self.section.family}, {amount(self.section.size().parameters)} parameters in {written}"


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Converts a name such as "bfloat16" to a dtype. Raises UserError if the name is not in DTYPES.

    A dtype or None is returned unchanged.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: use one of {', '.join(DTYPES)}")
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


@pickled.released()
def import_model(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    allow_pickle: bool = False,
    mtp: bool = False,
    config: str | Path | None = None,
    console: Console | None = None,
) -> WrittenModel:
    """Converts another tool's model to a checkpoint for `load_model`, `generate` and `model: {from: OUT}`.

    >>> made = weft.import_model("hf", "imported", dtype="bfloat16")
    >>> made.section.family
    'llama'

    Args:
        source: a folder with config.json, safetensors and the tokenizer, as written by `save_pretrained`; a GGUF file,
            whose quantized tensors are dequantized; or a distributed checkpoint of Megatron-Core (`torch_dist`) or
            torchtitan.
        out: the folder to write. It appears only when it is complete.
        dtype: dtype of the weights, such as "bfloat16". Default: the dtypes in the files; bfloat16 for tensors that are
            quantized.
        allow_pickle: whether to read `.bin` files if the folder has no safetensors file. Only tensors are unpickled.
        mtp: whether to import multi-token prediction layers, too.
        config: for distributed checkpoints, config.json of the model, or a Hugging Face folder with config.json and the
            tokenizer. Default: the files in `source`; for Megatron also the arguments in its common.pt.
        console: prints warnings and progress. Default: no output.

    Returns:
        An object with the numbers of `tensors`, `files` and `bytes`, and the model's `section`.

    Raises:
        UserError: the folder is incomplete, its architecture is unknown, or it has only `.bin` files and `allow_pickle`
            is false; or `out` cannot be written.
    """
    source, out, kind = Path(source), Path(out), parse_dtype(dtype)
    console = console or Console(prints=False)
    if is_gguf(source):
        section, entries, number = import_gguf(source, out, kind, console)
        return WrittenModel(section, len(entries), number, sum(entry.bytes for entry in entries))
    if (checkpoint := distributed_checkpoint(source)) is not None:
        return _import_distributed(open_distributed(checkpoint, source, config), out, kind, console)
    if config is not None:
        raise UserError("--config is only for distributed checkpoints; a Hugging Face folder has its own", source)
    folder = open_folder(source, allow_pickle=allow_pickle, prediction_layers=None if mtp else 0)
    warnings = [*folder.warnings, *tokenizer_warnings(source, folder.section, folder.config)]
    entries = [
        Entry(MODEL_PREFIX + name, saved_dtype(name, kind, folder.dtype(name)), one.shape, partial(folder.blocks, name))
        for name, one in folder.sources.items()
    ]
    contents = {files.MODEL: folder.section.model_dump(mode="json", by_alias=True), files.ORIGIN: read_origin(source)}
    tokenizer = source if (source / "tokenizer.json").is_file() else None
    warnings = [f"{source}: {warning}" for warning in warnings]
    number = write_checkpoint(out, entries, contents, tokenizer, warnings, "importing", console)
    return WrittenModel(folder.section, len(entries), number, sum(entry.bytes for entry in entries))


def _import_distributed(model: DistributedModel, out: Path, kind: torch.dtype | None, console: Console) -> WrittenModel:
    """Writes the model of a distributed checkpoint as a checkpoint of Weft."""
    section, described = model.section, model.described
    warnings = [*tokenizer_warnings(described, section, model.config or {}), *model.warnings]
    entries = [
        Entry(MODEL_PREFIX + name, saved_dtype(name, kind, saved.dtype), saved.shape, saved.blocks)
        for name, saved in model.tensors.items()
    ]
    contents: dict[str, Any] = {files.MODEL: section.model_dump(mode="json", by_alias=True)}
    if model.config is not None:
        contents[files.ORIGIN] = {"config": model.config, "generation_config": None} | read_origin(described)
    tokenizer = described if (described / "tokenizer.json").is_file() else None
    warnings = [f"{model.path}: {warning}" for warning in warnings]
    number = write_checkpoint(out, entries, contents, tokenizer, warnings, "importing", console)
    return WrittenModel(section, len(entries), number, sum(entry.bytes for entry in entries))
