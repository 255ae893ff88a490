"""Exports models to Megatron-Core's distributed checkpoints, which Megatron-LM and Megatron Bridge load."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from weft.checkpoint.distributed.dcp_writer import write_dcp
from weft.checkpoint.distributed.megatron import extra_states, megatron_layout
from weft.checkpoint.distributed.megatron_arguments import to_arguments
from weft.checkpoint.huggingface.import_model import WrittenModel, parse_dtype
from weft.checkpoint.tensor_file import main_dtype
from weft.errors import UserError
from weft.export.distributed import model_to_export, new_checkpoint_folder
from weft.observe.console import Console

FAMILIES = (
    "gpt2, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe, starcoder2; all without sliding windows. For other "
    "models, a message names the key that GPTModel does not support."
)
FOLDER, LATEST = "release", "latest_checkpointed_iteration.txt"
_VERSION = 3.0  # of Megatron's checkpoints: queries, keys and values alternate by group


def export(
    source: Path,
    out: Path,
    console: Console,
    *,
    dtype: str | torch.dtype | None = None,
    vocab_multiple: int = 128,
) -> WrittenModel:
    """Writes a checkpoint in the format torch_dist, for any tensor, pipeline and expert parallelism.

    Args:
        source: path of a checkpoint or of a Hugging Face folder. An adapter is merged with its base model.
        dtype: dtype of the weights. Default: as saved.
        vocab_multiple: number to a multiple of which the rows of embedding and output layer are padded, with zeros.
            Default: 128, as in Megatron-LM with `--tensor-model-parallel-size 1`; in general, 128 times that size.

    Raises:
        UserError: Megatron-Core's GPTModel cannot compute the model, or the checkpoint is damaged.
    """
    if vocab_multiple < 1:
        raise UserError(f"--vocab-multiple {vocab_multiple}: must be at least 1")
    model, section = model_to_export(source, "megatron", parse_dtype(dtype))
    rows = -(-(section.vocab_size or 0) // vocab_multiple) * vocab_multiple
    entries, shapes = megatron_layout(section, rows).entries(model.weights.tensors, parse_dtype(dtype))
    saved = getattr(torch, main_dtype(entries))
    common = {
        "args": to_arguments(section, rows, vocab_multiple, saved),
        "checkpoint_version": _VERSION,
        "iteration": 0,
    }
    with new_checkpoint_folder(out, model, section, entries, console) as (folder, on_bytes):
        inner = folder / FOLDER
        inner.mkdir()
        empty = io.BytesIO()
        torch.save([None], empty)
        write_dcp(inner, entries, shapes, on_bytes, dict.fromkeys(extra_states(section), empty.getvalue()))
        torch.save(common, inner / "common.pt")
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backend |= {"common_backend": "torch", "common_backend_version": 1}
        (inner / "metadata.json").write_text(json.dumps(backend))
        (folder / LATEST).write_text(FOLDER)
    return WrittenModel(section, len(shapes), len(entries), sum(entry.bytes for entry in entries))
