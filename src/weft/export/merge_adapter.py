"""Defines `weft.merge_adapter`, which merges an adapter with the weights of its base model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.adapter_start import base_of
from weft.checkpoint.adapter_weights import (
    Rounding,
    dequantized_weights,
    merge_weights,
    read_adapter,
    read_heads,
    replace_heads,
)
from weft.checkpoint.base_model import AnyModelSection, check_digest, open_base
from weft.checkpoint.huggingface.config_files import read_origin, with_stop_token
from weft.checkpoint.huggingface.import_model import WrittenModel, parse_dtype
from weft.checkpoint.huggingface.peft_files import read_peft
from weft.checkpoint.load import architecture, resolve, tokenizer_folder
from weft.checkpoint.shard_files import SHARD_BYTES, write_checkpoint
from weft.checkpoint.tensor_file import Entry, dtype_name
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.checkpoint.weights import Weights
from weft.config.adapter import trained_heads
from weft.config.model import CustomModelSection, ModelSection
from weft.errors import UserError
from weft.export.hf import ExportedModel, parse_size, write_huggingface
from weft.families.peft_config import read_peft_config
from weft.formatting import percent
from weft.models.huggingface_weights import saved_dtype
from weft.models.low_rank import LowRank
from weft.observe.console import Console

_LARGE_LOSS = 0.1  # part of the adapter; from here on, rounding is a warning


@dataclass(frozen=True)
class MergedModel:
    """A model that was written with a merged adapter.

    Attributes:
        written: the numbers of tensors, files and bytes.
        dtype: dtype of the merged weights.
        rounding_loss: norm of the rounding errors of the merged weights, divided by the norm of the adapter's changes.
    """

    written: WrittenModel
    dtype: torch.dtype
    rounding_loss: float

    def __str__(self) -> str:
        loss = f"rounding to {dtype_name(self.dtype)} loses {percent(self.rounding_loss, 1)} of the adapter (norm)"
        return f"{self.written}; {loss}" if self.dtype.itemsize < 4 else str(self.written)


def merge_adapter(
    source: str | Path,
    out: str | Path,
    adapter: str | Path | None = None,
    *,
    to: str = "hf",
    dtype: str | torch.dtype | None = None,
    dequantize: bool = False,
    max_shard_size: str | int = SHARD_BYTES,
    console: Console | None = None,
) -> MergedModel:
    """Writes a model whose weights are those of a base model with an adapter merged in.

    Merged weights are computed in at least float32 and then cast to the base model's dtype. Special tokens,
    generation_config.json (with the end-of-turn token of a run), the tokenizer and its chat template are kept.

    >>> made = weft.merge_adapter("hf", "merged", adapter="peft")
    >>> made.rounding_loss
    0.0

    Args:
        source: a run or checkpoint of an adapter; or, with `adapter`, the base model: a run, a checkpoint, an imported
            or a Hugging Face folder.
        out: the folder to write. It appears only when it is complete.
        adapter: a folder that PEFT's `save_pretrained` wrote. Default: the adapter of `source`.
        to: "hf", a Hugging Face folder; or "checkpoint", a checkpoint of Weft, also for models that Transformers has no
            class for.
        dtype: dtype of all weights, such as "float32". Default: the dtypes of the base model.
        dequantize: if the adapter was trained on a quantized base model (`adapter.quantize`), merge it with the
            dequantized weights on which it was trained.
        max_shard_size: maximum size of a file of a Hugging Face folder, in bytes or as a text such as "5GB".
        console: prints warnings and progress. Default: no output.

    Returns:
        An object with the numbers `written`, and `rounding_loss`: what part of the adapter was lost because the merged
        weights were rounded to their dtype.

    Raises:
        UserError: there is no adapter, it does not fit the base model or was trained on another one, the base model was
            quantized and `dequantize` is false, or `out` cannot be written.
    """
    if to not in ("hf", "checkpoint"):
        raise UserError(f"to: {to!r} is not a format for a merged model; use hf or checkpoint")
    kind, limit, console = parse_dtype(dtype), parse_size(max_shard_size), console or Console(prints=False)
    path, rounding = resolve(source), Rounding()
    if adapter is None:
        model, changed = merged_run(path, kind, rounding, dequantize)
    else:
        model, changed = _of_peft(path, Path(adapter), kind, rounding)
    if to == "hf":
        written = write_huggingface(model, Path(out), console, "merging", kind, limit)
    else:
        written = _write_checkpoint(model, Path(out), console, kind)
    merged = MergedModel(written, model.weights.tensors[changed].dtype, rounding.loss)
    if merged.dtype.itemsize < 4 and rounding.loss > _LARGE_LOSS:
        console.warning(
            f"{out}: rounding to {dtype_name(merged.dtype)} loses {percent(rounding.loss, 1)} of the adapter; merge "
            "with --dtype float32, or use the adapter unmerged (weft generate --adapter, weft export --to peft)"
        )
    return merged


def merged_run(
    checkpoint: Path, kind: torch.dtype | None, rounding: Rounding, dequantize: bool = False
) -> tuple[ExportedModel, str]:
    """Returns the merged model of an adapter's checkpoint, and the name of one of its changed weights.

    The weights are merged when they are read.

    Args:
        checkpoint: path of a checkpoint.
        kind: dtype of the merged weights. Default: the dtypes of the base model.
        rounding: counts the merged weights when they are read.
        dequantize: whether an adapter of a quantized base model is merged with the dequantized weights.

    Raises:
        UserError: the checkpoint has no adapter, its base model has changed, or the base model was quantized and
            `dequantize` is false.
    """
    record, section = read_adapter_record(checkpoint), architecture(checkpoint)
    if record is None:
        raise UserError(
            "this model has no adapter; give the run of an adapter, or a PEFT folder as --adapter", checkpoint
        )
    if record.section.quantize is not None and not dequantize:
        raise UserError(
            f"the adapter was trained on weights in {record.section.quantize}, and fits only these; add "
            "--dequantize to merge it with the dequantized weights, or export it alone (weft export --to peft)",
            checkpoint,
        )
    base = resolve(record.base.path)
    check_digest(section, base, record.base)
    changes, weights = read_adapter(checkpoint, record.section), open_base(section, base)
    if record.section.quantize is not None:
        weights = dequantized_weights(section, weights, record.section.quantize)
    tokenizer = tokenizer_folder(checkpoint) or tokenizer_folder(base)
    return _merged(section, weights, changes, read_heads(checkpoint, section), kind, rounding, tokenizer)


def _of_peft(base: Path, folder: Path, kind: torch.dtype | None, rounding: Rounding) -> tuple[ExportedModel, str]:
    """Returns the merged model of a PEFT folder, and the name of one of its changed weights."""
    section = architecture(base)
    if read_adapter_record(base) is not None:
        raise UserError("this is an adapter itself; with --adapter, give its base model", base)
    if isinstance(section, CustomModelSection):
        raise UserError(f"PEFT's names of the layers of a custom model ({section.type}) are not known", base)
    if isinstance(section, ModelSection) and read_peft_config(folder).scores:  # the base model can predict tokens
        section = ModelSection.model_validate({**section.model_dump(by_alias=True), "num_labels": 1})
    adapter = read_peft(folder, section)
    if (trained_on := base_of(adapter)) is not None:
        check_digest(section, base, trained_on)
    weights = open_base(section, base)
    return _merged(section, weights, adapter.layers, adapter.weights, kind, rounding, tokenizer_folder(base))


def _merged(
    section: AnyModelSection,
    weights: Weights,
    changes: Mapping[str, LowRank],
    full: Mapping[str, torch.Tensor],
    kind: torch.dtype | None,
    rounding: Rounding,
    tokenizer: Path | None,
) -> tuple[ExportedModel, str]:
    heads = {name: full[name] for name in trained_heads(section) if name in full}
    full = {name: weight for name, weight in full.items() if name not in heads}
    merged = merge_weights(replace_heads(weights, heads, kind), changes, full, kind, rounding)
    changed = next(name for name in merged.tensors if name.removesuffix(".weight") in changes or name in full)
    return ExportedModel(section, merged, tokenizer), changed


def _write_checkpoint(model: ExportedModel, out: Path, console: Console, kind: torch.dtype | None) -> WrittenModel:
    """Writes a checkpoint at step 0, as `weft import` does."""
    weights = model.weights
    if weights.huggingface:
        raise UserError("the files of this type: hf model cannot be written as a checkpoint; use --to hf", weights.path)
    entries = [
        Entry(MODEL_PREFIX + name, saved_dtype(name, kind, saved.dtype), saved.shape, saved.blocks)
        for name, saved in weights.tensors.items()
    ]
    contents: dict[str, Any] = {files.MODEL: model.section.model_dump(mode="json", by_alias=True)}
    if origin := read_origin(weights.path):
        generation = with_stop_token(origin.get("generation_config") or {}, model.tokenizer)
        contents[files.ORIGIN] = origin | {"generation_config": generation or None}
    warnings = [f"{weights.path}: {warning}" for warning in weights.warnings]
    number = write_checkpoint(out, entries, contents, model.tokenizer, warnings, "merging", console)
    return WrittenModel(model.section, len(entries), number, sum(entry.bytes for entry in entries))
