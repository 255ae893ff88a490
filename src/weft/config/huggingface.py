"""A Hugging Face folder as the checks of a run file see it: what its config.json says, read without torch.

A family's reading of a config.json is code, so its file in `weft/models/` is imported here, unlike its presets; family
files need no torch either.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.config.errors import UserError
from weft.config.headers import read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OURS = ("model.json", "index.json", "checksums.json", "checkpoints", "config.yaml")
_CHECKPOINT = re.compile(r"\.?step-\d{8}")  # a damaged or unfinished one is not taken for a folder of theirs
_THEIRS = (CONFIG, INDEX, SINGLE, "pytorch_model.bin", "pytorch_model.bin.index.json")
_FAMILIES = Path(__file__).resolve().parent.parent / "models"


def is_huggingface(path: str | Path) -> bool:
    """Whether a folder is meant to be one of Hugging Face's, whole or not; a run or checkpoint of Weft is none."""
    path = Path(path)
    if _CHECKPOINT.match(path.name) or any((path / name).exists() for name in _OURS):
        return False
    return any((path / name).exists() for name in _THEIRS) or (path.is_dir() and any(path.glob("*.safetensors")))


def read_config(path: str | Path, *, dequantized: bool = True) -> dict[str, Any]:
    """A folder's config.json.

    Args:
        dequantized: whether the one who asks reads quantized weights as what they stand for, where that can be.

    Raises:
        UserError: there is none, it is no JSON, or the weights are quantized in a way that is not read.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError("there is no such folder; download the model first, whole", path)
    if not (path / CONFIG).is_file():
        if any((path / name).exists() for name in _OURS):
            raise UserError(
                "this is a run or checkpoint of Weft already; a folder of Hugging Face's belongs here", path
            )
        if (path / "snapshots").is_dir():
            inner = next((str(found) for found in sorted((path / "snapshots").iterdir())), "one of snapshots/")
            raise UserError(f"this is a folder of the hub's cache; name the snapshot in it: {inner}", path)
        raise UserError("no config.json here, which says what model it is; download the whole repository", path)
    if (path / CONFIG).stat().st_size == 0:
        raise UserError("the file is empty; download it again", path / CONFIG)
    config = read_json(path / CONFIG)
    if not isinstance(config, dict):
        raise UserError("not a model's config.json: a mapping belongs here; download it again", path / CONFIG)
    try:
        method = quantization(config)
    except UserError as error:
        raise UserError(error.what, path / CONFIG) from None
    if method is not None and not dequantized:
        raise UserError(
            f"quantization_config: these weights are quantized ({method}); `weft import` and `model: {{from: ...}}` "
            "read such weights of the families that Weft has, type: hf does not",
            path / CONFIG,
        )
    return config


def quantization(config: dict[str, Any]) -> str | None:
    """Which of the formats that are read a model's weights are in, "mxfp4" or "fp8"; None: they are not quantized.

    Raises:
        UserError: any other format.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method", "quantized") if isinstance(given, dict) else "quantized"
    if method == "mxfp4":
        return method
    if method == "fp8":
        block = given.get("weight_block_size")
        sizes = block if isinstance(block, list) else []
        if len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes) and given.get("fmt") != "e5m2":
            return method
        method = f"fp8 with weight_block_size {block} and fmt {given.get('fmt')}"
    raise UserError(
        f"quantization_config: these weights are quantized ({method}) and cannot be trained; take the model that they "
        "were made from (only mxfp4, and fp8 in blocks of e4m3, are read as what they stand for)"
    )


@cache
def families() -> dict[str, ModuleType]:
    """The family files of `weft.models` by their names: those that say their ARCHITECTURES."""
    names = [file.stem for file in sorted(_FAMILIES.glob("*.py")) if "\nARCHITECTURES" in file.read_text("utf-8")]
    return {name: import_module(f"weft.models.{name}") for name in names}


def family_of(config: dict[str, Any]) -> ModuleType:
    """The family file for a config.json, by its `architectures`. Raises UserError if there is none."""
    known = {name: module for module in families().values() for name in module.ARCHITECTURES}
    named = config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    for name in named:
        if name in known:
            return known[name]
    if not named:  # a config.json made by hand
        for module in families().values():
            if config.get("model_type") == module.MODEL_TYPE:
                return module
        raise UserError(
            f"architectures: missing, and model_type is {config.get('model_type')!r}, no family here; name the "
            "model's, or train it with `model: {type: hf, path: ...}`"
        )
    near = difflib.get_close_matches(str(named[0]), known, 1, cutoff=0.0)
    raise UserError(
        f"architectures: unknown architecture {named[0]!r}; `model: {{type: hf, path: ...}}` trains any that "
        f"transformers has, data parallel only; of those here (`weft models` lists them) closest by name is {near[0]}"
    )


def section_keys(path: str | Path) -> dict[str, Any]:
    """The keys of `ModelSection` that a folder's config.json means.

    Raises:
        UserError: with the file, for an unknown architecture or a key that is not supported.
    """
    config = read_config(path)
    try:
        return family_of(config).from_hf(dict(config))
    except UserError as error:
        raise UserError(error.what, Path(path) / CONFIG) from None
