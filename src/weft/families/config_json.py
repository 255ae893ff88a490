"""A Hugging Face folder: whether one is, its config.json, and how its weights are quantized. Torch-free."""

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
_OURS = ("model.json", "index.json", "checksums.json", "checkpoints", "config.yaml")
_CHECKPOINT = re.compile(r"\.?step-\d{8}")  # a damaged or unfinished one is not taken for a folder of theirs
_THEIRS = (CONFIG, INDEX, SINGLE, "pytorch_model.bin", "pytorch_model.bin.index.json")


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


def check_weights(path: Path) -> None:
    """Raise UserError if there are no safetensors to start from; their headers are read when the run starts."""
    if (path / INDEX).is_file() or (path / SINGLE).is_file():
        return
    others = sorted(found.name for found in path.iterdir())
    if any(name.endswith(".safetensors") for name in others):
        raise UserError(f"{INDEX} or {SINGLE} is missing; download it as well", path)
    if any(name.endswith(_PICKLED) for name in others):
        raise UserError(
            "its weights are pickled, and no pickle is loaded; convert them where you trust them, with transformers' "
            "save_pretrained, or set model.weights: false to start from random ones",
            path,
        )
    raise UserError("there are no weights here; set model.weights: false to start from random ones", path)
