"""How a family file says what its names and keys are in Hugging Face's files. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from weft.config.errors import UserError
from weft.config.model import ModelSection
from weft.config.size import inner_width

# Keys of `ModelSection` that have the same name in most families' config.json.
SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_dropout", "initializer_range",
)  # fmt: skip
# What config.json calls a nonlinearity; of two names with one meaning the first is written.
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_ORIGINAL = "original_max_position_embeddings"
# The keys of each kind of scaling, beside rope_type.
_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
    ),
    "dynamic": ("factor",),
    "longrope": ("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
}  # fmt: skip


_WHOLE = {
    *SAME[:7], "head_dim", "sliding_window", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "n_shared_experts", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """One line of a family's table: where a module's parameters are in Hugging Face's files.

    Attributes:
        ours, theirs: names without `.weight` and `.bias`, which both sides have; `{n}` is the layer. Or whole
            names, where ours is of no module that has both. With `{e}`, the expert, theirs is one tensor for each,
            and ours all of them stacked.
        transposed: their matrix is `[in, out]` (GPT-2's).
        stacked: theirs has all experts too, `[expert, ...]`: the other attributes tell of each expert's.
        part: which part of their tensor's rows this is, and all parts' kinds, in order: "q" and "kv" are as many rows
            as queries, or keys, have numbers, "inner" is the MLP's width. None: the whole of it.
        by_head: the rows hold the parts of the first head, then those of the second, and so on (GPT-NeoX's).
        alternating: the rows are of the first part, the second, the first again, and so on (gpt-oss's).
    """

    ours: str
    theirs: str
    transposed: bool = False
    part: tuple[int, tuple[str, ...]] | None = None
    by_head: bool = False
    alternating: bool = False
    stacked: bool = False


def same(*more: str, without: tuple[str, ...] = (), **renamed: str) -> dict[str, str]:
    """A family's table of keys, ours -> theirs: `SAME`, `more` of one name, and those that have another.

    A key with a dot, `moe.num_experts`, is one of a part of our section.
    """
    return {key: key for key in (*SAME, *more) if key not in without} | renamed


def read(config: Mapping[str, Any], keys: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `ModelSection` from a config.json.

    Args:
        keys: ours -> theirs.
        defaults: of their keys, where config.json leaves one out.

    Raises:
        UserError: a key is missing that has no default.
    """
    found: dict[str, Any] = {}
    for ours, theirs in keys.items():
        value = config.get(theirs, defaults.get(theirs))  # null is a value: no sliding window, for one
        if value is None and theirs not in defaults:
            raise UserError(f"{theirs}: missing; a config.json of {config.get('model_type', 'this kind')} states it")
        if ours.rpartition(".")[2] in _WHOLE and value is not None and type(value) is not int:
            raise UserError(f"{theirs}: {value!r} is no whole number")
        found[ours] = value
    if found.get("hidden_act") is not None:
        found["hidden_act"] = activation(found["hidden_act"], keys["hidden_act"])
    return nested({key: value for key, value in found.items() if value is not None})


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """`{"moe.num_experts": 8}` as `{"moe": {"num_experts": 8}}`."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        part, dot, name = key.partition(".")
        if dot:
            found.setdefault(part, {})[name] = value
        else:
            found[key] = value
    return found


def write(section: ModelSection, keys: Mapping[str, str]) -> dict[str, Any]:
    """The config.json keys of a section, as `read` reads them, with sizes that follow from others written out."""
    whole = section.model_copy(
        update={
            "num_key_value_heads": section.kv_heads,
            "head_dim": section.qk_head_dim,
            "intermediate_size": inner_width(section),
            "attention_multiplier": attention_multiplier(section),
        }
    )
    # What belongs to a part that the section lacks is not written.
    there = {ours: theirs for ours, theirs in keys.items() if "." not in ours or getattr(whole, ours.split(".")[0])}
    written = {theirs: attrgetter(ours)(whole) for ours, theirs in there.items()}
    if "hidden_act" in keys:
        names = [theirs for theirs, ours in _ACTIVATIONS.items() if ours == section.hidden_act]
        written[keys["hidden_act"]] = names[0]
    return written


def attention_multiplier(section: ModelSection) -> float:
    """What attention's scores are multiplied by."""
    return section.attention_multiplier or section.qk_head_dim**-0.5


def read_layer_types(config: Mapping[str, Any], window: int | None, default: list[bool]) -> dict[str, Any]:
    """`sliding_window` and `layer_types`; `default` says of each layer whether it slides, unless config.json does."""
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if slides else "full_attention" for slides in default]
    if window is None or "sliding_attention" not in types:
        return {}
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != len(default):
        raise UserError(
            f"layer_types: {len(types)} layers of {', '.join(sorted(set(types)))}; it must have one of full_attention "
            f"and sliding_attention for each of the {len(default)} layers"
        )
    return {"sliding_window": window, "layer_types": types}


def write_layer_types(section: ModelSection) -> dict[str, Any]:
    """The same back."""
    slides = [section.slides(layer) for layer in range(section.num_hidden_layers)]
    return {
        "sliding_window": section.sliding_window if any(slides) else None,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
    }


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """A key's number, or the default for none and null. Raises UserError for what is no number above 0."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise UserError(f"{key}: {value!r} is no number above 0")
    return value


def activation(name: Any, key: str) -> str:
    """Our name of a nonlinearity. Raises UserError for one that there is not."""
    if name not in _ACTIVATIONS:
        raise UserError(f"{key}: no nonlinearity {name!r} here; there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def refuse(config: Mapping[str, Any], **allowed: Any) -> None:
    """Raise UserError where one of these keys is there and not null, and has another value than the one given."""
    for key, value in allowed.items():
        if config.get(key) not in (None, value):
            raise UserError(f"{key}: {config[key]!r} is not supported, only {value!r}")


def read_rope(config: Mapping[str, Any], theta: float = 10000.0, layer_type: str | None = None) -> dict[str, Any]:
    """Keys of `ModelSection` about rotations, from transformers 5's `rope_parameters` or the older separate keys.

    Args:
        theta: the family's default base.
        layer_type: read the part of `rope_parameters` for layers of this type, where it has such parts.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"rope_scaling: must be a mapping, not {given!r}")
    if isinstance(given.get(layer_type), dict):
        given = given[layer_type]
    if any(isinstance(given.get(key), dict) for key in ("full_attention", "sliding_attention")):
        raise UserError("rope_parameters: this family has no other rotations for some of its layers than for the rest")
    found: dict[str, Any] = {"rope_theta": float(number(given, "rope_theta", number(config, "rope_theta", theta)))}
    kind = given.get("rope_type") or given.get("type") or "default"
    partial = number(given, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        found["partial_rotary_factor"] = partial
    if kind == "default":
        return found
    found["rope_scaling"] = {"rope_type": kind, **_read_scaling(config, given, kind)}
    return found


def _read_scaling(config: Mapping[str, Any], given: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The keys of `RopeScaling` beside rope_type."""
    if kind not in _SCALING:
        raise UserError(f"rope_scaling: rope_type {kind!r} is not supported; there are {', '.join(_SCALING)}")
    scaling = {key: given[key] for key in _SCALING[kind] if given.get(key) is not None}
    longest = config.get("max_position_embeddings")
    if kind == "dynamic":  # transformers stretches from there on, whatever else is stated
        scaling[_ORIGINAL] = longest
    elif kind != "linear":  # as in transformers, what stands beside the mapping comes before what stands in it
        scaling[_ORIGINAL] = config.get(_ORIGINAL) or scaling.get(_ORIGINAL) or longest
    if "factor" not in scaling and kind in ("yarn", "longrope"):
        scaling["factor"] = number(config, "max_position_embeddings", 1) / number(scaling, _ORIGINAL, 1)
    if "factor" not in scaling:
        raise UserError(f"rope_scaling: a rope_type of {kind!r} needs a factor")
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        if not isinstance(scaling.get(key), list) or not scaling[key]:
            raise UserError(f"rope_scaling: a rope_type of 'longrope' needs {key}, a list of numbers")
        scaling[key] = [float(number({key: factor}, key, 1.0)) for factor in scaling[key]]
    return scaling


def write_rope(section: ModelSection) -> dict[str, Any]:
    """The same back, in both spellings: `rope_parameters` for transformers 5, the others for what is older."""
    scaling = {"rope_type": "default"}
    if section.rope_scaling is not None:
        stated = section.rope_scaling.model_dump(exclude_none=True)
        kind = stated["rope_type"]
        scaling = {"rope_type": kind} | {key: stated[key] for key in _SCALING[kind] if key in stated}
    written: dict[str, Any] = {"rope_theta": section.rope_theta}
    if section.rope_scaling is not None:
        written["rope_scaling"] = dict(scaling)
    scaling["rope_theta"] = section.rope_theta
    if section.partial_rotary_factor != 1.0:
        scaling["partial_rotary_factor"] = written["partial_rotary_factor"] = section.partial_rotary_factor
    return {**written, "rope_parameters": scaling}
