"""How a family file says what its names and keys are in Hugging Face's files. Torch-free."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import UserError
from weft.families.json_values import LARGEST_WHOLE, bounded, layer_types, whole
from weft.families.rope_keys import read_rope, write_rope

Translation = Callable[[dict[str, Any]], dict[str, Any]]

# Keys of `model:` that families compute with: whole numbers, before anything is made of them.
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "mla.qk_nope_head_dim", "mla.qk_rope_head_dim",
)  # fmt: skip
_MOST = {"num_hidden_layers": 10_000, "moe.num_experts": 10_000}
# Keys of `model:` that have the same name in most families' config.json.
SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_dropout", "initializer_range",
    "pad_token_id",
)  # fmt: skip
# What config.json calls a nonlinearity; of two names with one meaning the first is written.
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
# Where null says that there is none of it, though a family's default is another.
_NONE = {
    "num_key_value_heads", "sliding_window", "mla.q_lora_rank", "attn_logit_softcapping", "logit_softcap",
    "pad_token_id",
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

    name: str
    hf_name: str
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


def renaming(
    always: Mapping[str, Any], table: Mapping[str, str], defaults: Mapping[str, Any], **allowed: Any
) -> tuple[Translation, Translation]:
    """`from_hf` and `to_hf` of a family that needs no more than its table, and rotations of the whole head.

    Args:
        always: keys of `model:` that all its models have.
        table, defaults: as `read` takes them.
        allowed: the only values of some keys that are supported, as `refuse` takes them.
    """

    def from_hf(config: dict[str, Any]) -> dict[str, Any]:
        refuse(config, **allowed)
        return {**always, **read(config, table, defaults), **read_rope(config, defaults)}

    def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
        return write(keys, table) | write_rope(keys)

    return from_hf, to_hf


def size(
    width: int, layers: int, heads: int, groups: int | None = None, inner: int | None = None, **more: Any
) -> dict[str, Any]:
    """A row of a family's presets: the keys that make up a model's size.

    Args:
        width, layers, heads: `hidden_size`, `num_hidden_layers`, `num_attention_heads`.
        groups, inner: `num_key_value_heads`, `intermediate_size`; None: as they are by default.
        more: further keys.
    """
    sizes = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "intermediate_size": inner,
    }  # fmt: skip
    return {key: value for key, value in sizes.items() if value is not None} | more


def read(config: Mapping[str, Any], keys: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `model:` from a config.json. Sizes are whole numbers; what checks the keys sees to the other types.

    Args:
        keys: ours -> theirs.
        defaults: of their keys, where config.json leaves one out; None: null is as good as none.

    Raises:
        UserError: a key is missing that has no default, it is null where that has no meaning, a number is too large
            for a model; or `layer_types` has not one known name for each layer.
    """
    found: dict[str, Any] = {}
    for ours, theirs in keys.items():
        value = config.get(theirs, defaults.get(theirs))
        if ours in _SIZES and value is not None:
            whole({theirs: value}, theirs, 1)
        if value is not None:
            most = _MOST.get(ours, LARGEST_WHOLE)
            found[ours] = activation(value, theirs) if ours == "hidden_act" else bounded(value, theirs, most)
        elif theirs not in defaults:
            raise UserError(f"{theirs}: missing; a config.json of {_kind(config)} states it")
        elif defaults[theirs] is not None and ours not in _NONE:
            raise UserError(f"{theirs}: null has no meaning here; give a value, or remove the key")
    if "pad_token_id" in found:
        found["pad_token_id"] = _padding_row(found["pad_token_id"], found.get("vocab_size"))
    if "num_hidden_layers" in found:
        layer_types(config, found["num_hidden_layers"])
    return nested(found)


def _padding_row(token: Any, rows: Any) -> Any:
    """The row that nn.Embedding takes a `padding_idx` for: counted from the end if it is negative; none beyond it."""
    if type(token) is not int or type(rows) is not int:
        return token  # what checks the keys tells of it
    row = token + rows if token < 0 else token
    return row if 0 <= row < rows else None


def _kind(config: Mapping[str, Any]) -> str:
    named = config.get("model_type")
    return named if isinstance(named, str) else "this kind"


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


def write(keys: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    """The config.json keys of a model's, as `read` reads them with the same table."""
    written = {}
    for ours, theirs in table.items():
        part, _, name = ours.rpartition(".")
        where = keys[part] if part else keys
        if where is not None:  # what belongs to a part that the model lacks is not written
            written[theirs] = where[name]
    if "hidden_act" in table:
        names = [theirs for theirs, ours in _ACTIVATIONS.items() if ours == keys["hidden_act"]]
        written[table["hidden_act"]] = names[0]
    return written


def read_window(config: Mapping[str, Any], default: int | None) -> int | None:
    """`sliding_window`; None where it is null. Raises UserError."""
    if config.get("sliding_window", default) is None:
        return None
    return whole(config, "sliding_window", default or 1)


def read_layer_types(config: Mapping[str, Any], window: int | None, default: list[bool]) -> dict[str, Any]:
    """`sliding_window` and `layer_types`; `default` says of each layer whether it slides, unless config.json does."""
    types = layer_types(config, len(default))
    if types is None:
        types = ["sliding_attention" if slides else "full_attention" for slides in default]
    if "sliding_attention" not in types:
        return {}
    if window is None:
        raise UserError("sliding_window: none, and some layers have one; state how many tokens they see")
    return {"sliding_window": window, "layer_types": types}


def write_layer_types(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The same back."""
    slides = "sliding_attention" in keys["layer_types"]
    return {"sliding_window": keys["sliding_window"] if slides else None, "layer_types": keys["layer_types"]}


def activation(name: Any, key: str) -> str:
    """Our name of a nonlinearity. Raises UserError for one that there is not."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UserError(f"{key}: no nonlinearity {reprlib.repr(name)} here; there are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def keep_activation_names(written: dict[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the nonlinearity's name that another has, where both mean the same one.

    transformers sums `gelu_new` in another order than `gelu_pytorch_tanh`, so its logits differ in the last digits.
    """
    names = {key: origin[key] for key in written if key in _ACTIVATION_KEYS and isinstance(origin.get(key), str)}
    alike = {key: name for key, name in names.items() if _ACTIVATIONS.get(name) == _ACTIVATIONS.get(written[key])}
    return written | alike


def refuse(config: Mapping[str, Any], **allowed: Any) -> None:
    """Raise UserError where one of these keys is there and has another value than the one given.

    Null is as good as none, unless the value is true: it would be taken for false.
    """
    for key, value in allowed.items():
        said = config.get(key, value)
        alike = said == value and isinstance(said, bool) == isinstance(value, bool)
        if not alike and (said is not None or value is True):
            raise UserError(f"{key}: {reprlib.repr(said)} is not supported, only {reprlib.repr(value)}")
