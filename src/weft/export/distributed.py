"""What the exports of distributed checkpoints (`megatron`, `dcp`) share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.adapter_weights import Rounding
from weft.checkpoint.huggingface.config_files import copy_tokenizer_files
from weft.checkpoint.load import architecture, tokenizer_folder
from weft.checkpoint.model_parts import without_prediction_layers
from weft.checkpoint.shard_files import new_folder
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.weights import open_weights
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.export.hf import ExportedModel, huggingface_config_files
from weft.export.merge_adapter import merged_run
from weft.observe.console import Console


def model_to_export(source: Path, to: str, kind: torch.dtype | None) -> tuple[ExportedModel, ModelSection]:
    """Opens a model of the built-in decoder, with its adapter merged. Returns the model and its section.

    The section is without multi-token prediction layers, which are not exported.

    Args:
        to: name of the export format, for messages.
        kind: dtype of merged weights. Default: the dtypes of the base model.

    Raises:
        UserError: the model is not a built-in decoder, or its files are damaged.
    """
    section = architecture(source)
    if not isinstance(section, ModelSection):
        remedy = "use --to hf" if section.type == "hf" else "use torch.distributed.checkpoint in your own code"
        raise UserError(f"a model of type {section.type} is not supported by --to {to}; {remedy}", source)
    section = without_prediction_layers(section)  # neither program's model has them
    if read_adapter_record(source) is not None:
        return merged_run(source, kind, Rounding())[0], section
    return ExportedModel(section, open_weights(source, huggingface=False), tokenizer_folder(source)), section


@contextmanager
def new_checkpoint_folder(
    out: Path, model: ExportedModel, section: ModelSection, entries: Sequence[Entry], console: Console
) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """Context manager that makes the folder of a checkpoint, with config.json and the tokenizer's files beside it.

    It yields the folder, under its hidden name, and a function that receives the numbers of bytes written. If the block
    succeeds, the folder is renamed to `out`.
    """
    total = sum(entry.bytes for entry in entries)
    for warning in model.weights.warnings:
        console.warning(f"{model.weights.path}: {warning}")
    contents = {}
    try:
        contents = huggingface_config_files(model.weights.path, section, model.tokenizer, list(entries))
    except UserError as error:
        console.warning(f"no config.json is written: {error.what}")
    with new_folder(out, total) as folder, console.progress(total, "exporting", unit="B") as progress:
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress.update(done)

        yield folder, on_bytes
        for name, content in contents.items():
            files.write_json(folder / name, content)
        if model.tokenizer is not None:
            copy_tokenizer_files(model.tokenizer, folder)
