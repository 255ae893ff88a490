"""Exports models to Hugging Face folders, which AutoModelForCausalLM and AutoTokenizer load."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.config_files import (
    SPECIAL,
    copy_tokenizer_files,
    read_origin,
    special_ids,
    tokenizer_warnings,
    with_stop_token,
)
from weft.checkpoint.huggingface.folder import names_in_files
from weft.checkpoint.huggingface.import_model import WrittenModel, parse_dtype
from weft.checkpoint.huggingface.transformers_files import transformers_config_files, transformers_entries
from weft.checkpoint.load import architecture, tokenizer_folder
from weft.checkpoint.model_parts import without_prediction_layers
from weft.checkpoint.shard_files import SHARD_BYTES, new_huggingface_folder, split_into_shards
from weft.checkpoint.tensor_file import Entry, main_dtype
from weft.checkpoint.weights import Weights, open_weights, to_huggingface
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.families import families
from weft.families.config_json import CONFIG
from weft.families.mapping import keep_activation_names
from weft.models.huggingface_weights import saved_dtype, to_config_json
from weft.observe.console import Console

FAMILIES = "all that Transformers has, type: hf, and custom models of these classes; no custom components."
GENERATION = "generation_config.json"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export(
    source: Path,
    out: Path,
    console: Console,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: str | int = SHARD_BYTES,
) -> WrittenModel:
    """Writes config.json, safetensors files and tokenizer files.

    Sharded checkpoints are assembled one tensor at a time. The folder is renamed to `out` when it is complete; if the
    export fails, nothing is left.

    Args:
        source: path of a checkpoint or of a Hugging Face folder.
        dtype: dtype of the weights. Default: as saved.
        max_shard_size: maximum size of a file, in bytes or as a text such as "5GB". A tensor is never split.

    Raises:
        UserError: the checkpoint is damaged, or no Hugging Face model family has this architecture.
    """
    kind, limit = parse_dtype(dtype), parse_size(max_shard_size)
    model = ExportedModel(architecture(source), open_weights(source, huggingface=False), tokenizer_folder(source))
    return write_huggingface(model, out, console, "exporting", kind, limit)


@dataclass(frozen=True)
class ExportedModel:
    """A model to write as a Hugging Face folder.

    Attributes:
        section: the `model` section.
        weights: the weights. Special token ids and generation_config.json of the folder `weights.path` are kept.
        tokenizer: the tokenizer's folder; None: there is no tokenizer.
    """

    section: ModelSection | TransformersModelSection | CustomModelSection
    weights: Weights
    tokenizer: Path | None


def write_huggingface(
    model: ExportedModel, out: Path, console: Console, task: str, kind: torch.dtype | None, limit: int
) -> WrittenModel:
    """Writes a Hugging Face folder, as `export` does.

    Args:
        task: label of the progress bar.
        kind: dtype of the weights. Default: as saved.
        limit: maximum number of bytes of a file.
    """
    weights, tokenizer, source = model.weights, model.tokenizer, model.weights.path
    section, dropped = _exported_section(model.section)
    if isinstance(section, TransformersModelSection):
        kinds = {name: saved_dtype(name, kind, saved.dtype) for name, saved in weights.tensors.items()}
        if weights.huggingface:
            entries = [Entry(name, kinds[name], saved.shape, saved.full) for name, saved in weights.tensors.items()]
        else:
            entries = transformers_entries(section, kinds, lambda name: weights.tensors[name].full())
        config_files = transformers_config_files(section, entries)
        if generation := read_origin(source).get("generation_config"):
            config_files[GENERATION] = generation
    elif isinstance(section, ModelSection):
        converted = to_huggingface(source, section, weights.tensors)
        names = {external: sources[0][0] for external, sources in names_in_files(section).items()}
        entries = [
            Entry(name, saved_dtype(names[name], kind, saved.dtype), saved.shape, saved.full)
            for name, saved in converted.items()
        ]
        config_files = huggingface_config_files(source, section, tokenizer, entries)
    else:
        raise UserError(
            f"a custom model ({section.type}) cannot be exported unless it is a causal language model of Transformers "
            "of a family that Weft has, a subclass of one, or a module around one; export a model of the built-in "
            "decoder or of type: hf",
            source / files.MODEL,
        )
    if generation := with_stop_token(config_files.get(GENERATION, {}), tokenizer):
        config_files[GENERATION] = generation
    warnings = [*weights.warnings, *dropped, *tokenizer_warnings(tokenizer, section, config_files[CONFIG])]
    warnings = [f"{source}: {warning}" for warning in warnings]
    shards = split_into_shards(entries, limit)
    with new_huggingface_folder(out, shards, task, console, warnings) as folder:
        for name, content in config_files.items():
            files.write_json(folder / name, content)
        if tokenizer is not None:
            copy_tokenizer_files(tokenizer, folder)
    return WrittenModel(section, len(entries), len(shards), sum(entry.bytes for entry in entries))


def _exported_section(section: Any) -> tuple[Any, list[str]]:
    """Returns a `model` section without multi-token prediction layers if the family has none, and a warning if so."""
    if not isinstance(section, ModelSection) or not section.num_nextn_predict_layers:
        return section, []
    family = families().get(section.family)
    if family is None or "num_nextn_predict_layers" in family.KEYS:
        return section, []
    what = f"Hugging Face's {family.ARCHITECTURES[0]} has no multi-token prediction layers"
    return without_prediction_layers(section), [f"model.num_nextn_predict_layers: {what}; they are not exported"]


def huggingface_config_files(
    source: Path, section: ModelSection, tokenizer: Path | None, entries: list[Entry]
) -> dict[str, dict[str, Any]]:
    """Returns file name -> content, for config.json and generation_config.json.

    Args:
        tokenizer: folder of the tokenizer, which defines special token ids; None without a tokenizer.
        entries: the tensors to write, whose main dtype config.json names.
    """
    try:
        config = to_config_json(section)
    except UserError as error:
        raise UserError(error.what, source / files.MODEL) from None
    origin = read_origin(source)
    if origin:
        special = {key: origin["config"][key] for key in SPECIAL if key in origin["config"]}
        config = keep_activation_names(config, origin["config"])
    else:
        special = special_ids(tokenizer, section)
        if section.pad_token_id is not None:
            special["pad_token_id"] = section.pad_token_id
    kind = main_dtype(entries)
    generation = origin.get("generation_config") or {key: id for key, id in special.items() if id is not None}
    return {CONFIG: config | special | {"dtype": kind, "torch_dtype": kind}, GENERATION: generation}


def parse_size(size: str | int) -> int:
    """Converts a size such as `5GB`, `500 MB`, `2GiB` or a number to bytes. Raises UserError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(size).strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
        raise UserError(f"--max-shard-size {size}: not a size; use a size such as 5GB or 500MB")
    return max(1, int(float(match[1]) * UNITS[match[2].upper()]))
