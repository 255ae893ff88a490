"""A Hugging Face folder as the checks of a run file see it: what its config.json says, read without torch.

A family's reading of a config.json is code, so its file in `weft/models/` is imported here, unlike its presets; family
files need no torch either.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from weft.config.errors import UserError
from weft.config.experts import wrong_experts
from weft.config.headers import read_json
from weft.config.model import ModelSection
from weft.config.size import model_size

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OURS = ("model.json", "index.json", "checksums.json", "checkpoints", "config.yaml")
_CHECKPOINT = re.compile(r"\.?step-\d{8}")  # a damaged or unfinished one is not taken for a folder of theirs
_THEIRS = (CONFIG, INDEX, SINGLE, "pytorch_model.bin", "pytorch_model.bin.index.json")
# Names for a family's model_type in files whose repositories bring code of their own for what is the family's.
_ALSO = {"deepseek_v3": ("kimi_k2",)}
_MOST_PARAMETERS = 10**15  # beyond a thousand trillion it is a mistake, and sizes of tensors overflow
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
    """The family file for a config.json, by its `architectures`.

    Raises:
        UserError: there is none, or `model_type`, which transformers goes by, is another's.
    """
    known = {name: module for module in families().values() for name in module.ARCHITECTURES}
    named = config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    for name in named:
        if isinstance(name, str) and name in known:
            _check_type(config.get("model_type"), name, known[name])
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


def _check_type(said: Any, architecture: str, family: ModuleType) -> None:
    if said is not None and said not in (family.MODEL_TYPE, *_ALSO.get(family.MODEL_TYPE, ())):
        raise UserError(
            f"model_type: {reprlib.repr(said)}, and architectures names {architecture}, whose model_type is "
            f"{family.MODEL_TYPE!r}; the two disagree about what model this is: mend the one that is wrong"
        )


def keys_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json.

    Raises:
        UserError: an unknown architecture, or a key's value that is not supported; it names the key.
    """
    family = family_of(config)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        said = config.get(key)
        ids = said if key == "eos_token_id" and isinstance(said, list) else [said]
        if said is not None and not all(type(one) is int for one in ids):
            raise UserError(f"{key}: {reprlib.repr(said)} is no token's id, which is a whole number")
    return family.from_hf(dict(config))


def model_of(config: dict[str, Any]) -> ModelSection:
    """The model that a config.json means, its sizes checked against one another as a run file's are.

    Raises:
        UserError: as `keys_of`, or for sizes that do not fit together.
    """
    try:
        section = ModelSection(**keys_of(config))
    except ValidationError as error:
        mistake = error.errors()[0]
        key = ".".join(map(str, mistake["loc"]))
        raise UserError(f"{key}: {mistake['msg']} (it is {reprlib.repr(mistake['input'])})") from None
    if what := _wrong_sizes(section):
        raise UserError(f"{what}; if it is not meant so, the file is damaged: download it again")
    return section


def _wrong_sizes(section: ModelSection) -> str | None:
    """What of a model's sizes cannot be together."""
    heads, groups, moe = section.num_attention_heads, section.kv_heads, section.moe
    if heads % groups or (section.head_dim is None and section.mla is None and section.hidden_size % heads):
        return (
            f"a width of {section.hidden_size}, {heads} attention heads and {groups} key-value heads do not divide one "
            "another"
        )
    if section.position == "rope" and (section.rotary_dim < 2 or section.rotary_dim % 2):
        return f"rotations turn pairs of numbers, and {section.rotary_dim} of each head's are rotated"
    if section.rope_scaling and (unfit := section.rope_scaling.unfit(section.rotary_dim)):
        return f"rope_scaling: {unfit}"
    wrong = moe and wrong_experts(moe.num_experts, moe.num_experts_per_tok, moe.n_group, moe.topk_group)
    if wrong:
        return ": ".join(wrong)
    size = model_size(section).parameters
    return f"its sizes are those of a model of {float(size):.1e} parameters" if size > _MOST_PARAMETERS else None


def section_keys(path: str | Path) -> dict[str, Any]:
    """The keys of `ModelSection` that a folder's config.json means.

    Raises:
        UserError: with the file, for an unknown architecture or a key that is not supported.
    """
    config = read_config(path)
    try:
        return keys_of(config)
    except UserError as error:
        raise UserError(error.what, Path(path) / CONFIG) from None
