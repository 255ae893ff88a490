"""Model families: what transformers' config.json and weight files of a family mean in the keys of `model:`, and back.

A family is one file of this package, with the attributes of `Family`; a file without `ARCHITECTURES` is a helper of
theirs. Nothing here imports torch, or knows the sections that check the keys (`weft.config`): families take and return
plain mappings.
"""

from __future__ import annotations

import difflib
import math
import pkgutil
import reprlib
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

from weft.errors import UserError
from weft.families.mapping import Weight

# Names for a family's model_type in files whose repositories bring code of their own for what is the family's.
_ALSO = {"deepseek_v3": ("kimi_k2",)}


class Family(Protocol):
    """What a family's file has.

    Attributes:
        __doc__: its first line goes into the table of families: name, source, and what is special.
        ARCHITECTURES: the classes of transformers that it reads; an export names the first.
        MODEL_TYPE: transformers' `model_type`.
        KEYS: keys of `model:` -> config.json's (`weft.families.mapping.same`).
        WEIGHTS: where each module's parameters are in Hugging Face's files.
        PRESETS: published sizes, by name, as keys of `model:`; may be left out.
    """

    __doc__: str | None
    ARCHITECTURES: tuple[str, ...]
    MODEL_TYPE: str
    KEYS: dict[str, str]
    WEIGHTS: tuple[Weight, ...]
    PRESETS: dict[str, dict[str, Any]]

    def from_hf(self, config: dict[str, Any]) -> dict[str, Any]:
        """The keys of `model:` for a config.json. Raises UserError for what is not supported."""
        ...

    def to_hf(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of the config.json that transformers loads, of all keys of `model:` (`ModelSection.resolved`)."""
        ...


@cache
def families() -> dict[str, Family]:
    """All families by their names, which are those of their files."""
    modules = {one.name: import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)}
    return {name: cast(Family, module) for name, module in modules.items() if hasattr(module, "ARCHITECTURES")}


def family_of(config: dict[str, Any]) -> Family:
    """The family of a config.json, by its `architectures`.

    Raises:
        UserError: there is none, or `model_type`, which transformers goes by, is another's.
    """
    known = {name: family for family in families().values() for name in family.ARCHITECTURES}
    named = config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    for name in named:
        if isinstance(name, str) and name in known:
            _check_type(config.get("model_type"), name, known[name])
            return known[name]
    if not named:  # a config.json made by hand
        for family in families().values():
            if config.get("model_type") == family.MODEL_TYPE:
                return family
        raise UserError(
            f"architectures: missing, and model_type is {config.get('model_type')!r}, no family here; name the "
            "model's, or train it with `model: {type: hf, path: ...}`"
        )
    near = difflib.get_close_matches(str(named[0]), known, 1, cutoff=0.0)
    raise UserError(
        f"architectures: unknown architecture {named[0]!r}; `model: {{type: hf, path: ...}}` trains any that "
        f"transformers has, data parallel only; of those here (`weft models` lists them) closest by name is {near[0]}"
    )


def _check_type(said: Any, architecture: str, family: Family) -> None:
    if said is not None and said not in (family.MODEL_TYPE, *_ALSO.get(family.MODEL_TYPE, ())):
        raise UserError(
            f"model_type: {reprlib.repr(said)}, and architectures names {architecture}, whose model_type is "
            f"{family.MODEL_TYPE!r}; the two disagree about what model this is: mend the one that is wrong"
        )


@cache
def presets() -> dict[str, dict[str, Any]]:
    """All presets: name -> keys of `model:`."""
    found: dict[str, dict[str, Any]] = {}
    for name, family in families().items():
        found |= resolve_presets(getattr(family, "PRESETS", {}), name)
    return found


def resolve_presets(stated: dict[str, dict[str, Any]], family: str) -> dict[str, dict[str, Any]]:
    """A family's presets. One that names another before it as its `preset` states only the keys that differ.

    Raises:
        ValueError: a preset is made from one that does not stand before it.
    """
    whole: dict[str, dict[str, Any]] = {}
    for name, keys in stated.items():
        base, own = keys.get("preset"), {key: value for key, value in keys.items() if key != "preset"}
        if base is not None and base not in whole:
            raise ValueError(f"{family}: preset {name!r} is made from {base!r}, which does not stand before it")
        whole[name] = own if base is None else _merged(whole[base], own)
    return whole


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The keys of both; `own` wins, and mappings merge."""
    both = [key for key, value in own.items() if isinstance(value, dict) and isinstance(base.get(key), dict)]
    return base | own | {key: _merged(base[key], own[key]) for key in both}


def rescaled_multipliers(preset: dict[str, Any], model: dict[str, Any]) -> dict[str, float]:
    """The multipliers that a preset has because of its width or its heads' size, for a model of another."""
    found = {}
    width, wanted = preset["hidden_size"], model.get("hidden_size")
    if (
        isinstance(wanted, int)
        and wanted > 0
        and math.isclose(preset.get("embedding_multiplier", 1.0), math.sqrt(width))
    ):
        found["embedding_multiplier"] = math.sqrt(wanted)
    scale, own, other = preset.get("attention_multiplier"), _head_size(preset), _head_size(model)
    if scale is not None and own is not None and other is not None and own != other:
        found["attention_multiplier"] = scale * math.sqrt(own / other)
    return found


def _head_size(model: dict[str, Any]) -> int | None:
    """Numbers of a query's head; None if its keys are not yet known to be right."""
    latent = model.get("mla")
    keys = [latent.get("qk_nope_head_dim"), latent.get("qk_rope_head_dim")] if isinstance(latent, dict) else []
    keys = keys or [model.get("head_dim")]
    if keys == [None]:
        width, heads = model.get("hidden_size"), model.get("num_attention_heads")
        return width // heads if isinstance(width, int) and isinstance(heads, int) and 0 < heads <= width else None
    sizes = [key for key in keys if isinstance(key, int) and key > 0]
    return sum(sizes) if len(sizes) == len(keys) else None
