"""Hugging Face folders: their detection, config.json, and quantization. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.files import read_json

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_WEFT_FILES = ("model.json", "index.json", "checksums.json", "checkpoints", "config.yaml")
_CHECKPOINT = re.compile(r"\.?step-\d{8}")  # also matches damaged or unfinished checkpoints
_HF_FILES = (CONFIG, INDEX, SINGLE, "pytorch_model.bin", "pytorch_model.bin.index.json")


def is_huggingface(path: str | Path) -> bool:
    """Whether a folder is a (possibly incomplete) Hugging Face model, and not a run or checkpoint of Weft."""
    path = Path(path)
    if _CHECKPOINT.match(path.name) or any((path / name).exists() for name in _WEFT_FILES):
        return False
    return any((path / name).exists() for name in _HF_FILES) or (path.is_dir() and any(path.glob("*.safetensors")))


def read_config(path: str | Path, *, dequantized: bool = True) -> dict[str, Any]:
    """Reads a folder's config.json.

    Args:
        path: the folder.
        dequantized: whether the caller can dequantize weights in the supported formats.

    Raises:
        UserError: the folder or its config.json is missing, config.json is invalid, or the quantization of the weights
            is not supported.
    """
    path = Path(path)
    if path.is_file():
        raise UserError("this is a file; give a Hugging Face folder (`weft import` also reads GGUF files)", path)
    if not path.is_dir():
        raise UserError("there is no such folder; download the full model first", path)
    if not (path / CONFIG).is_file():
        if any((path / name).exists() for name in _WEFT_FILES):
            raise UserError("this is a run or checkpoint of Weft; use a Hugging Face folder", path)
        if (path / "snapshots").is_dir():
            inner = next((str(found) for found in sorted((path / "snapshots").iterdir())), "one of snapshots/")
            raise UserError(f"this is a cache folder of the Hugging Face hub; use the snapshot in it: {inner}", path)
        if (path / "adapter_config.json").exists():
            raise UserError(
                "this is an adapter of PEFT, not a model; use its base model, and name the adapter apart", path
            )
        raise UserError("config.json is missing; download the full repository", path)
    if (path / CONFIG).stat().st_size == 0:
        raise UserError("the file is empty; download it again", path / CONFIG)
    config = read_json(path / CONFIG)
    if not isinstance(config, dict):
        raise UserError("config.json must be a mapping; download it again", path / CONFIG)
    try:
        method = quantization(config)
    except UserError as error:
        raise UserError(error.what, path / CONFIG) from None
    if method is not None and not dequantized:
        raise UserError(
            f"quantization_config: these weights are quantized ({method}), which type: hf does not support; for "
            "built-in families use `weft import` or `model: {from: ...}`",
            path / CONFIG,
        )
    return config


def quantization(config: dict[str, Any]) -> str | None:
    """Returns the format of quantized weights, "mxfp4" or "fp8"; None if the weights are not quantized.

    Raises:
        UserError: the weights are quantized in another format.
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
        f"quantization_config: these weights are quantized ({method}) and cannot be trained; use the original, "
        "unquantized model (supported quantized formats: mxfp4, and fp8 in blocks of e4m3)"
    )


def check_weights(path: Path) -> None:
    """Raises UserError if a folder has no safetensors files. Does not read the files; the run does when it starts."""
    if (path / INDEX).is_file() or (path / SINGLE).is_file():
        return
    others = sorted(found.name for found in path.iterdir())
    if any(name.endswith(".safetensors") for name in others):
        raise UserError(f"{INDEX} or {SINGLE} is missing; download it as well", path)
    if any(name.endswith(_PICKLED) for name in others):
        raise UserError(
            "the weights are pickled, and type: hf loads no pickles; if you trust the files, convert "
            "them with transformers' save_pretrained, or set model.weights: false to start from random weights",
            path,
        )
    raise UserError("there are no weights in this folder; set model.weights: false to start from random weights", path)
