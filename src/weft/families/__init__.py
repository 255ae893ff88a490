"""Model families: conversions between Hugging Face's config.json and the keys of `model:`, and tables of weights.

A family is a module of this package with the attributes of `Family`; modules without `ARCHITECTURES` are helpers.
No module of this package imports torch or the sections of `weft.config`: families take and return plain mappings.
"""

from __future__ import annotations

import difflib
import math
import pkgutil
import re
import reprlib
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

from weft.errors import UserError
from weft.families.mapping import Weight

# Further `model_type` values of a family, from repositories that have custom code for the same architecture.
_ALIASES = {"deepseek_v3": ("kimi_k2",)}


class Family(Protocol):
    """The interface of a family's module.

    Attributes:
        __doc__: docstring of the module. The first line (name, paper and features) is shown in the table of families.
        ARCHITECTURES: names of the Transformers classes whose models the family reads. Exported config.json files name
            the first class.
        MODEL_TYPE: Transformers' `model_type`.
        KEYS: keys of `model:` -> keys of config.json (made with `weft.families.mapping.same`).
        WEIGHTS: the names and layouts of parameters in Hugging Face's files.
        PRESETS: name of a preset -> keys of `model:`, for published sizes; optional.
        PREDICTION_COPIES: name of a parameter -> name, with the layer `{n}`, of its copy in each multi-token prediction
            layer of Hugging Face's files; optional, for families with such layers.
        CLASSIFIER: Transformers' class `...ForSequenceClassification` of the family, None if there is none; optional,
            default: named like the first class of `ARCHITECTURES`.
    """

    __doc__: str | None
    ARCHITECTURES: tuple[str, ...]
    MODEL_TYPE: str
    KEYS: dict[str, str]
    WEIGHTS: tuple[Weight, ...]
    PRESETS: dict[str, dict[str, Any]]

    def from_hf(self, config: dict[str, Any]) -> dict[str, Any]:
        """Converts a config.json to keys of `model:`. Raises UserError if the config.json is not supported."""
        ...

    def to_hf(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Converts all keys of `model:` (`ModelSection.resolved`) to the config.json that Transformers loads."""
        ...


@cache
def families() -> dict[str, Family]:
    """Returns all families by name, the name of the module. Raises UserError if a module lacks an attribute."""
    modules = {one.name: import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)}
    found = {name: module for name, module in modules.items() if hasattr(module, "ARCHITECTURES")}
    for module in found.values():
        for needed in ("MODEL_TYPE", "KEYS", "WEIGHTS", "from_hf", "to_hf"):
            if not hasattr(module, needed):
                raise UserError(f"a model family needs {needed}; add it (docs/add-a-model.md)", module.__file__)
    return {name: cast(Family, module) for name, module in found.items()}


def classifier_of(family: Family) -> str | None:
    """Returns Transformers' class for the family's models with `num_labels`; None if there is no such class."""
    name = re.sub("(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", family.ARCHITECTURES[0])
    return getattr(family, "CLASSIFIER", name)


def family_of(config: dict[str, Any]) -> Family:
    """Returns the family of a config.json, by `architectures` or, if this key is missing, by `model_type`.

    Raises:
        UserError: no family supports the config.json, or `architectures` and `model_type` contradict each other.
    """
    known = {name: family for family in families().values() for name in (*family.ARCHITECTURES, classifier_of(family))}
    architectures = config.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    for name in architectures:
        if isinstance(name, str) and name in known:
            _check_model_type(config.get("model_type"), name, known[name])
            return known[name]
    if not architectures:
        for family in families().values():
            if config.get("model_type") == family.MODEL_TYPE:
                return family
        raise UserError(
            f"architectures: missing, and model_type {config.get('model_type')!r} is not a built-in family; set "
            "architectures, or train the model with `model: {type: hf, path: ...}`"
        )
    near = difflib.get_close_matches(str(architectures[0]), filter(None, known), 1, cutoff=0.0)
    raise UserError(
        f"architectures: unknown architecture {architectures[0]!r}; the closest built-in one is {near[0]} "
        "(`weft models` lists all); to train any model of transformers, data parallel only, use `model: {type: hf, "
        "path: ...}`"
    )


def _check_model_type(given: Any, architecture: str, family: Family) -> None:
    if given is not None and given not in (family.MODEL_TYPE, *_ALIASES.get(family.MODEL_TYPE, ())):
        raise UserError(
            f"model_type: {reprlib.repr(given)} contradicts architectures: {architecture} has model_type "
            f"{family.MODEL_TYPE!r}; correct model_type or architectures"
        )


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Returns all presets: name -> keys of `model:`."""
    found: dict[str, dict[str, Any]] = {}
    for name, family in families().items():
        found |= resolve_presets(getattr(family, "PRESETS", {}), name)
    return found


def resolve_presets(stated: dict[str, dict[str, Any]], family: str) -> dict[str, dict[str, Any]]:
    """Resolves inheritance among a family's presets.

    A preset whose key `preset` names an earlier preset inherits the keys of the earlier preset, and overrides some.

    Args:
        stated: the family's `PRESETS`.
        family: name of the family, for the error message.

    Raises:
        ValueError: the key `preset` does not name an earlier preset.
    """
    resolved: dict[str, dict[str, Any]] = {}
    for name, keys in stated.items():
        base, changes = keys.get("preset"), {key: value for key, value in keys.items() if key != "preset"}
        if base is not None and base not in resolved:
            raise ValueError(f"{family}: preset {name!r} extends {base!r}, which is not defined before it")
        resolved[name] = changes if base is None else _merged(resolved[base], changes)
    return resolved


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merges two mappings and, recursively, the mappings in them. Other values of `changes` replace those of `base`."""
    both = [key for key, value in changes.items() if isinstance(value, dict) and isinstance(base.get(key), dict)]
    return base | changes | {key: _merged(base[key], changes[key]) for key in both}


def rescaled_multipliers(preset: dict[str, Any], model: dict[str, Any]) -> dict[str, float]:
    """Returns a preset's multipliers that depend on the hidden size or head size, rescaled to the sizes of `model`."""
    found = {}
    hidden = model.get("hidden_size")
    from_hidden = math.isclose(preset.get("embedding_multiplier", 1.0), math.sqrt(preset["hidden_size"]))
    if isinstance(hidden, int) and hidden > 0 and from_hidden:
        found["embedding_multiplier"] = math.sqrt(hidden)
    scale, head, wanted = preset.get("attention_multiplier"), _head_size(preset), _head_size(model)
    if scale is not None and head is not None and wanted is not None and head != wanted:
        found["attention_multiplier"] = scale * math.sqrt(head / wanted)
    return found


def _head_size(model: dict[str, Any]) -> int | None:
    """Returns the size of a query head; None if the keys, which are not validated yet, are invalid."""
    latent = model.get("mla")
    if isinstance(latent, dict):
        sizes: list[Any] = [latent.get("qk_nope_head_dim"), latent.get("qk_rope_head_dim")]
    elif model.get("head_dim") is not None:
        sizes = [model["head_dim"]]
    else:
        hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
        return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and 0 < heads <= hidden else None
    return sum(sizes) if all(isinstance(size, int) and size > 0 for size in sizes) else None
