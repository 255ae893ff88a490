"""Converts a GGUF file to a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.gguf.architectures import ARCHITECTURES, Architecture
from weft.checkpoint.gguf.latent import K_B, V_B, joined_parts, stored_part
from weft.checkpoint.gguf.library import gguf_library, open_gguf
from weft.checkpoint.gguf.metadata import read_section
from weft.checkpoint.gguf.rope import FREQS, LONG, SHORT
from weft.checkpoint.gguf.tensors import OUTPUT, layout, tensor_names
from weft.checkpoint.gguf.tokenizer_json import write_tokenizer
from weft.checkpoint.huggingface.config_files import tokenizer_warnings
from weft.checkpoint.shard_files import write_checkpoint
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.formatting import counted
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import saved_dtype, saved_tensors
from weft.models.initialize import on_meta
from weft.observe.console import Console

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_FACTORS = (FREQS, LONG, SHORT)


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its suffix or its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == SUFFIX or file.read(4) == _MAGIC


def import_gguf(
    source: Path, out: Path, dtype: torch.dtype | None, console: Console
) -> tuple[ModelSection, list[Entry], int]:
    """Converts a GGUF file to a checkpoint. Quantized tensors are dequantized.

    Args:
        dtype: dtype of the weights. Default: the dtype of the matrices in the file; bfloat16 if any is quantized.

    Returns:
        The model's section, its tensors, and the number of files.

    Raises:
        UserError: the file is damaged, or its architecture or tokenizer is not supported.
    """
    metadata, stored = _read(source)
    try:
        return _convert(source, out, metadata, stored, dtype, console)
    except UserError as error:
        raise UserError(error.what, error.where or source) from None


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the metadata and the tensors of a GGUF file."""
    reader = open_gguf(source)
    try:
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError) as error:
        raise UserError(f"damaged ({error}); download the file again", source) from None
    if metadata.get("general.type", "model") != "model":
        raise UserError(f"this file has a GGUF {metadata['general.type']}, not a model", source)
    if metadata.get("split.count", 0) not in (0, 1):
        raise UserError("a part of a split file; merge the parts with llama.cpp's llama-gguf-split --merge", source)
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _values(tensor: Any) -> torch.Tensor:
    """Returns a tensor of the file, dequantized, in at least float32."""
    values = gguf_library().quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values.copy()).reshape(_shape(tensor))


def _convert(
    source: Path,
    out: Path,
    metadata: Mapping[str, Any],
    stored: Mapping[str, Any],
    dtype: torch.dtype | None,
    console: Console,
) -> tuple[ModelSection, list[Entry], int]:
    if "token_embd.weight" not in stored:
        raise UserError("the tensor token_embd.weight is missing; download the file again")
    factors = {name: _values(stored[name]) for name in _FACTORS if name in stored}
    section = _section(metadata, stored, factors)
    entries = _entries(section, ARCHITECTURES[section.family], stored, dtype or _main_dtype(stored))
    quantized = sum(one.tensor_type.name not in _DTYPES for one in stored.values())
    warnings = []
    if quantized and dtype is None:
        warnings.append(f"{counted(quantized, 'tensor is', 'tensors are')} quantized and will be read as bfloat16")
    contents = {files.MODEL: section.model_dump(mode="json", by_alias=True)}
    with tempfile.TemporaryDirectory() as made:
        folder = None
        if metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"):
            folder = Path(made)
            write_tokenizer(metadata, folder)
        warnings += tokenizer_warnings(folder, section, {})
        warnings = [f"{source}: {warning}" for warning in warnings]
        number = write_checkpoint(out, entries, contents, folder, warnings, "importing", console)
    return section, entries, number


def _main_dtype(stored: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype of the matrices: GGUF stores vectors and some matrices as float32 beside any other type."""
    saved = {_DTYPES.get(one.tensor_type.name, torch.bfloat16) for one in stored.values() if len(one.shape) > 1}
    narrow = saved - {torch.float32}
    return next(iter(narrow)) if len(narrow) == 1 else torch.bfloat16 if narrow else torch.float32


def _section(
    metadata: Mapping[str, Any], stored: Mapping[str, Any], factors: Mapping[str, torch.Tensor]
) -> ModelSection:
    """Returns the `model:` section of a file. Raises UserError for numbers that do not describe the file's tensors."""
    vocabulary = _shape(stored["token_embd.weight"])[0]
    blocks = len({name.split(".")[1] for name in stored if name.startswith("blk.")})
    for key, value in metadata.items():
        known = range(blocks, blocks + 1) if key.endswith(".block_count") else range(vocabulary)
        if key.endswith((".block_count", "_token_id")) and (isinstance(value, list) or value not in known):
            has = f"{counted(blocks, 'block')} and {vocabulary:,} tokens"
            raise UserError(f"the metadata key {key} is {value}, but the file has {has}; download the file again")
    try:
        return read_section(metadata, stored, vocabulary, factors)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}"
    except ZeroDivisionError:
        what = "a number of heads is 0"
    raise UserError(f"the metadata describe no valid model ({what}); download the file again")


def _entries(section: ModelSection, kind: Architecture, stored: Mapping[str, Any], dtype: torch.dtype) -> list[Entry]:
    """Returns the tensors of Weft's model, which are read from the file when they are written.

    Raises:
        UserError: the tensors of the file are not those of the model.
    """
    with on_meta():
        shapes = {name: tuple(one.shape) for name, one in saved_tensors(Decoder(section)).items()}
    names = tensor_names(section, kind)
    if missing := names.keys() - stored.keys():
        raise UserError(f"the tensor {min(missing)} is missing; download the file again")
    if unknown := stored.keys() - names.keys() - {*_FACTORS}:
        raise UserError(f"the tensor {min(unknown)} is not part of architecture {kind.name}, as Weft knows it")
    entries = []
    for name, ours in names.items():
        if name == OUTPUT and section.tie_word_embeddings:
            continue
        start, tensor = 0, stored[name]
        whole = torch.empty(sum(shapes[one][0] for one in ours), *shapes[ours[0]][1:], device="meta")
        expected = list(stored_part(section, name, whole).shape)
        if list(_shape(tensor)) != expected:
            raise UserError(f"{name} has the shape {list(_shape(tensor))}, but the metadata describe {expected}")
        saved = _DTYPES.get(tensor.tensor_type.name, torch.bfloat16)
        if name.endswith((K_B, V_B)):  # parts of one tensor
            if name.endswith(K_B):
                read = partial(_read_joined, tensor, stored[name.replace(K_B, V_B)])
                entries.append(Entry(MODEL_PREFIX + ours[0], saved_dtype(ours[0], dtype, saved), shapes[ours[0]], read))
            continue
        for one in ours:
            end = start + shapes[one][0]
            read = partial(_read_rows, section, kind, one, tensor, start, end)
            entries.append(Entry(MODEL_PREFIX + one, saved_dtype(one, dtype, saved), shapes[one], read))
            start = end
    return entries


def _read_joined(keys: Any, values: Any) -> torch.Tensor:
    return joined_parts(_values(keys), _values(values))


def _read_rows(section: ModelSection, kind: Architecture, name: str, tensor: Any, start: int, end: int) -> torch.Tensor:
    return layout(section, kind, name, _values(tensor)[start:end], back=True)
