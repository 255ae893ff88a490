"""PEFT's adapter_config.json: which layers of a Transformers model an adapter changes. Does not import torch."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.files import read_json

ADAPTER_CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"

# Names in files that differ in the models of transformers 5, and so in PEFT's files.
_RENAMED = ((".block_sparse_moe.", ".mlp."), ("embed_out.", "lm_head."))
# Keys that change nothing in the saved weights or their use.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "task_type",
    "lora_dropout", "fan_in_fan_out", "ensure_weight_tying", "runtime_config", "megatron_core", "qalora_group_size",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "target_modules", "target_parameters",
    "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save",
    "init_lora_weights",
}  # fmt: skip
# Initializations that also change the weights of the base model: their adapters do not fit the original base.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_PEFT_MERGE = "merge the adapter with PEFT (merge_and_unload), and use the merged model"


@dataclass(frozen=True)
class PeftConfig:
    """The content of an adapter_config.json of LoRA.

    Attributes:
        path: path of the file.
        rank, alpha: `r` and `lora_alpha` of all layers without an entry in `rank_pattern` or `alpha_pattern`.
        rslora: whether the scale is alpha / sqrt(rank) (Kalajdzievski, 2023) instead of alpha / rank.
        dora: whether the adapter has magnitudes (Liu et al., 2024).
        base: path or name of the base model; None: not recorded.
        keys: all keys of the file.
    """

    path: Path
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    base: str | None
    keys: Mapping[str, Any]

    @property
    def scores(self) -> bool:
        """Whether the adapted model has a head `score` in place of an output head."""
        return self.keys.get("task_type") == "SEQ_CLS"

    def rank_of(self, name: str) -> int:
        """Returns the rank of a layer. `name` is the layer's name in the Transformers model."""
        return self._by_pattern("rank_pattern", name, self.rank)

    def scale_of(self, name: str) -> float:
        """Returns the factor of the product B A of a layer."""
        rank = self.rank_of(name)
        return self._by_pattern("alpha_pattern", name, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def _by_pattern(self, key: str, name: str, default: Any) -> Any:
        patterns = self.keys.get(key) or {}
        return next((value for one, value in patterns.items() if re.match(rf"(.*\.)?({one})$", name)), default)

    def targets(self, name: str, head: str | None) -> bool:
        """Whether the adapter changes the linear layer `name`.

        Args:
            head: name of the output head, which "all-linear" leaves out.
        """
        chosen = self.keys.get("target_modules")
        saved = self.keys.get("modules_to_save") or ()
        if _matches(self.keys.get("exclude_modules"), name) or any(
            re.match(rf"(^|.*\.){one}($|\..*)", name) for one in saved
        ):
            return False
        if isinstance(chosen, str) and chosen.lower() == ALL_LINEAR:
            return name != head
        return _matches(chosen, name) and (isinstance(chosen, str) or name in (chosen or ()) or self._in_layers(name))

    def targets_parameter(self, name: str) -> bool:
        """Whether the adapter changes the stacked weights of experts with this name."""
        return _matches(list(self.keys.get("target_parameters") or ()), name)

    def saves(self, name: str) -> bool:
        """Whether the files contain the full weights of the module `name` (`modules_to_save`)."""
        return name.endswith(tuple(self.keys.get("modules_to_save") or ()))

    def _in_layers(self, name: str) -> bool:
        layers = self.keys.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self.keys.get("layers_pattern") or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name):
                return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
        return False


def _matches(chosen: str | Collection[str] | None, name: str) -> bool:
    """Whether `chosen` selects the module `name`: a regular expression for the full name, or a list of names.

    A name in the list selects the module of this name, and all modules whose names end with a dot and this name.
    """
    if isinstance(chosen, str):
        return re.fullmatch(chosen, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in chosen or ())


def in_transformers(name: str) -> str:
    """Returns the name in a model of transformers 5 of a tensor or module in a Hugging Face file."""
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return name


def read_peft_config(folder: str | Path) -> PeftConfig:
    """Reads the adapter_config.json of a folder that PEFT's `save_pretrained` wrote.

    Raises:
        UserError: the file is missing or invalid, or the adapter is not of LoRA or uses an unsupported option.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not Path(folder).is_dir():
        raise UserError("there is no such folder; give a folder that PEFT's save_pretrained wrote", Path(folder))
    if not path.is_file():
        raise UserError(f"{ADAPTER_CONFIG} is missing; give a folder that PEFT's save_pretrained wrote", Path(folder))
    keys = read_json(path)
    if not isinstance(keys, dict):
        raise UserError("not a JSON object; save the adapter again", path)
    if keys.get("peft_type") != "LORA":
        what = f"peft_type: {reprlib.repr(keys.get('peft_type'))} is not supported, only 'LORA'"
        raise UserError(f"{what}; {_PEFT_MERGE}", path)
    for key, value in keys.items():
        if key not in _WITHOUT_EFFECT | _READ and value:
            raise UserError(f"{key}: {reprlib.repr(value)} is not supported; {_PEFT_MERGE}", path)
    _check(keys, path)
    init = str(keys.get("init_lora_weights")).lower()
    if init.startswith(_CHANGES_BASE):
        raise UserError(
            f"init_lora_weights: {init!r} changed the weights of the base model, so the adapter does not fit the "
            "original base; save it with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            path,
        )
    base = keys.get("base_model_name_or_path")
    flags = {name: bool(keys.get(key)) for name, key in (("rslora", "use_rslora"), ("dora", "use_dora"))}
    return PeftConfig(path, keys.get("r", 8), keys.get("lora_alpha", 8), base=base or None, keys=keys, **flags)


def _check(keys: Mapping[str, Any], path: Path) -> None:
    """Raises UserError if a value of an adapter_config.json has a wrong type, or is an invalid regular expression."""

    def is_names(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    def is_rank(value: Any) -> bool:
        return is_number(value) and isinstance(value, int) and value > 0

    def is_pattern(value: Any, check: Any) -> bool:
        return isinstance(value, dict) and all(map(check, value.values()))

    rules = {
        "r": (is_rank(keys.get("r", 8)), "a positive integer"),
        "lora_alpha": (is_number(keys.get("lora_alpha", 8)), "a number"),
        "bias": (keys.get("bias", "none") in ("none", "all", "lora_only"), "none, all or lora_only"),
        "rank_pattern": (is_pattern(keys.get("rank_pattern") or {}, is_rank), "a mapping to positive integers"),
        "alpha_pattern": (is_pattern(keys.get("alpha_pattern") or {}, is_number), "a mapping to numbers"),
    }
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = keys.get(key)
        rules[key] = (value is None or isinstance(value, str) or is_names(value), "a text or a list of texts")
    for key in ("target_parameters", "modules_to_save"):
        rules[key] = (keys.get(key) is None or is_names(keys[key]), "a list of texts")
    layers = keys.get("layers_to_transform")
    numbers = [] if layers is None else layers if isinstance(layers, list) else [layers]
    rules["layers_to_transform"] = (all(isinstance(one, int) for one in numbers), "a number or a list of numbers")
    for key, (valid, expected) in rules.items():
        if not valid:
            raise UserError(f"{key}: {reprlib.repr(keys.get(key))} is not {expected}; save the adapter again", path)
    regexes = [key for name in ("rank_pattern", "alpha_pattern") for key in keys.get(name) or {}]
    regexes += [keys[key] for key in ("target_modules", "exclude_modules") if isinstance(keys.get(key), str)]
    regexes += keys.get("modules_to_save") or []
    for one in regexes:
        try:
            re.compile(one)
        except re.error as error:
            raise UserError(f"{one!r} is not a regular expression: {error}; save the adapter again", path) from None
