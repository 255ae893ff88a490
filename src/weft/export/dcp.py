"""Exports models to checkpoints of torch.distributed.checkpoint (DCP), with the names of torchtitan's models."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.checkpoint.distributed.dcp_writer import write_dcp
from weft.checkpoint.distributed.torchtitan import torchtitan_layout
from weft.checkpoint.huggingface.import_model import WrittenModel, parse_dtype
from weft.export.distributed import model_to_export, new_checkpoint_folder
from weft.observe.console import Console

FAMILIES = "llama, mistral, phi3 (as torchtitan's Llama 3), qwen3, qwen3_moe; without sliding windows and biases."


def export(source: Path, out: Path, console: Console, *, dtype: str | torch.dtype | None = None) -> WrittenModel:
    """Writes a checkpoint that torchtitan loads with `--checkpoint.initial_load_path`.

    Args:
        source: path of a checkpoint or of a Hugging Face folder. An adapter is merged with its base model.
        dtype: dtype of the weights. Default: as saved.

    Raises:
        UserError: neither torchtitan's Llama 3 nor its Qwen3 can compute the model, or the checkpoint is damaged.
    """
    model, section = model_to_export(source, "dcp", parse_dtype(dtype))
    entries, shapes = torchtitan_layout(section).entries(model.weights.tensors, parse_dtype(dtype))
    with new_checkpoint_folder(out, model, section, entries, console) as (folder, on_bytes):
        write_dcp(folder, entries, shapes, on_bytes)
    return WrittenModel(section, len(shapes), len(entries), sum(entry.bytes for entry in entries))
