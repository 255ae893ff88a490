"""Maps a family's config.json keys and tensor names to Weft's, by tables. Does not import torch."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import UserError
from weft.families.json_values import MAX_INTEGER, bounded, integer, layer_types
from weft.families.rope_keys import read_rope, write_rope

Translation = Callable[[dict[str, Any]], dict[str, Any]]
# Two functions: the first reads the keys of sliding windows from a config.json and a number of layers, the second
# writes them from all keys.
Windows = tuple[Callable[[dict[str, Any], int], dict[str, Any]], Translation]

# Keys of `model:` that families compute with; their values must be integers.
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "mla.qk_nope_head_dim", "mla.qk_rope_head_dim",
)  # fmt: skip
_MAX = {"num_hidden_layers": 10_000, "moe.num_experts": 10_000}
# Keys of `model:` that have the same name in most families' config.json.
SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_dropout", "initializer_range",
    "pad_token_id",
)  # fmt: skip
# Hugging Face's names of activation functions -> Weft's names. If a function has several names, the first is written.
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
# Keys for which null means "none", even if the family's default is a value.
_NULLABLE = {
    "num_key_value_heads", "sliding_window", "mla.q_lora_rank", "attn_logit_softcapping", "logit_softcap",
    "pad_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """The name and layout of a module's parameters in Hugging Face's files.

    Attributes:
        name: Weft's name of the module, without `.weight` and `.bias`, or the full name of a single tensor. `{n}`
            stands for the layer.
        hf_name: Hugging Face's name, in the same form. `{e}` stands for the expert: the file then has a tensor per
            expert, and Weft's tensor stacks these tensors.
        transposed: whether the file's matrix is `[in, out]` (GPT-2).
        stacked: whether the file's tensor is `[experts, ...]`; the other attributes then apply to each expert's matrix.
        part: (index, kinds) if the file's tensor concatenates several tensors: the index of Weft's tensor among the
            concatenated tensors, and the kind of each tensor, in order. The kind determines the number of rows: "q" for
            queries, "kv" for keys or values, "inner" for the MLP's intermediate size.
        by_head: whether the concatenated tensors alternate head by head (GPT-NeoX).
        alternating: whether the concatenated tensors alternate row by row (gpt-oss).
    """

    name: str
    hf_name: str
    transposed: bool = False
    part: tuple[int, tuple[str, ...]] | None = None
    by_head: bool = False
    alternating: bool = False
    stacked: bool = False


def fused(hf_name: str, kinds: Mapping[str, str], **options: bool) -> tuple[Weight, ...]:
    """Returns a `Weight` for each of Weft's tensors that Hugging Face's file concatenates into one tensor.

    Args:
        hf_name: Hugging Face's name of the concatenated tensor.
        kinds: Weft's name of each weight -> kind (`Weight.part`), in the order of concatenation.
        options: further attributes of `Weight`.
    """
    all_kinds = tuple(kinds.values())
    return tuple(Weight(name, hf_name, part=(index, all_kinds), **options) for index, name in enumerate(kinds))


QKV = {f"layers.{{n}}.attention.{name}": kind for name, kind in (("q_proj", "q"), ("k_proj", "kv"), ("v_proj", "kv"))}


def expert_weights(hf_prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Returns the `Weight`s of experts if the file has a tensor per expert, such as `{hf_prefix}.{e}.{gate}.weight`.

    Args:
        hf_prefix: beginning of the tensors' names in the file, without the expert.
        gate, up, down: names of an expert's matrices in the file.
    """
    names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return tuple(
        Weight(f"layers.{{n}}.mlp.experts.{name}", f"{hf_prefix}.{{e}}.{hf_name}.weight")
        for name, hf_name in names.items()
    )


def same(*more: str, without: tuple[str, ...] = (), **renamed: str) -> dict[str, str]:
    """Returns a family's table of keys: key of `model:` -> key of config.json.

    Keys of a nested section have a dot, such as `moe.num_experts`.

    Args:
        more: keys, in addition to `SAME`, that have the same name in config.json.
        without: keys of `SAME` that the family does not have.
        renamed: key of `model:` -> its name in config.json, if the names differ.
    """
    return {key: key for key in (*SAME, *more) if key not in without} | renamed


def renaming(
    always: Mapping[str, Any],
    table: Mapping[str, str],
    defaults: Mapping[str, Any],
    windows: Windows | None = None,
    **allowed: Any,
) -> tuple[Translation, Translation]:
    """Returns the functions `from_hf` and `to_hf` of a family whose keys differ from Weft's only in their names.

    The functions convert the rotary embedding with `read_rope` and `write_rope`.

    Args:
        always: key of `model:` -> value that it has in all models of the family.
        table: key of `model:` -> key of config.json, made with `same`.
        defaults: default values of config.json's keys; passed to `read`.
        windows: functions that read and write the keys of sliding windows; None: these keys are in `table`.
        allowed: key of config.json -> the only supported value; passed to `refuse`.
    """

    def from_hf(config: dict[str, Any]) -> dict[str, Any]:
        refuse(config, **allowed)
        keys = read(config, table, defaults)
        sliding = {} if windows is None else windows[0](config, keys["num_hidden_layers"])
        return {**always, **keys, **read_rope(config, defaults), **sliding}

    def to_hf(keys: dict[str, Any]) -> dict[str, Any]:
        return write(keys, table) | write_rope(keys) | ({} if windows is None else windows[1](keys))

    return from_hf, to_hf


def size(
    hidden: int, layers: int, heads: int, kv_heads: int | None = None, intermediate: int | None = None, **more: Any
) -> dict[str, Any]:
    """Returns the keys of `model:` for a preset: its sizes, except those that are None, and the keys `more`."""
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
    }  # fmt: skip
    return {key: value for key, value in sizes.items() if value is not None} | more


def read(config: Mapping[str, Any], table: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Reads keys of `model:` from a config.json. The caller checks the types of all values except sizes.

    Args:
        config: a config.json.
        table: key of `model:` -> key of config.json.
        defaults: default values of config.json's keys. If the default is None, null counts as a missing key.

    Raises:
        UserError: a key without default is missing, a key that cannot be null is null, a number is too large, an
            activation function is unknown, or `layer_types` does not have a known type for each layer.
    """
    found: dict[str, Any] = {}
    for key, hf_key in table.items():
        value = config.get(hf_key, defaults.get(hf_key))
        if key in _SIZES and value is not None:
            integer({hf_key: value}, hf_key, 1)
        if value is not None:
            most = _MAX.get(key, MAX_INTEGER)
            found[key] = activation(value, hf_key) if key == "hidden_act" else bounded(value, hf_key, most)
        elif hf_key not in defaults:
            model_type = config.get("model_type")
            kind = f" of {model_type}" if isinstance(model_type, str) else ""
            raise UserError(f"{hf_key}: missing; a config.json{kind} must have it")
        elif defaults[hf_key] is not None and key not in _NULLABLE:
            raise UserError(f"{hf_key}: null has no meaning; set a value, or remove the key")
    if "pad_token_id" in found:
        found["pad_token_id"] = _padding_row(found["pad_token_id"], found.get("vocab_size"))
    if "num_hidden_layers" in found:
        layer_types(config, found["num_hidden_layers"])
    return nested(found)


def _padding_row(token: Any, rows: Any) -> Any:
    """Returns the index of a padding token's embedding row; None if there is no such row.

    If `token` or `rows` is not an integer, returns `token`.

    Args:
        token: id of the padding token; a negative id counts from the end.
        rows: number of rows of the embedding.
    """
    if type(token) is not int or type(rows) is not int:
        return token  # the caller's checks report the type
    row = token + rows if token < 0 else token
    return row if 0 <= row < rows else None


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Nests keys that have a dot: `{"moe.num_experts": 8}` becomes `{"moe": {"num_experts": 8}}`."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        section, dot, name = key.partition(".")
        if dot:
            found.setdefault(section, {})[name] = value
        else:
            found[key] = value
    return found


def write(keys: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    """Converts keys of `model:` to keys of config.json: the inverse of `read`.

    If a section of `model:` such as `moe` is null, omits the keys of this section.
    """
    written = {}
    for key, hf_key in table.items():
        section, _, name = key.rpartition(".")
        values = keys[section] if section else keys
        if values is not None:
            written[hf_key] = values[name]
    if "hidden_act" in table:
        names = [hf_name for hf_name, name in _ACTIVATIONS.items() if name == keys["hidden_act"]]
        written[table["hidden_act"]] = names[0]
    return written


def read_window(config: Mapping[str, Any], default: int | None) -> int | None:
    """Returns the value of `sliding_window`, which is `default` if the key is missing; None if it is null.

    Raises:
        UserError: the value is not a positive integer.
    """
    if config.get("sliding_window", default) is None:
        return None
    return integer(config, "sliding_window", default or 1)


def read_layer_types(config: Mapping[str, Any], window: int | None, default: list[bool]) -> dict[str, Any]:
    """Returns the keys `sliding_window` and `layer_types` of `model:`; empty if no layer has a sliding window.

    Args:
        config: a config.json.
        window: sliding window size; None: config.json has none.
        default: for each layer, whether it has a sliding window if `layer_types` is missing.

    Raises:
        UserError: `layer_types` is invalid, or has sliding windows although `window` is None.
    """
    types = layer_types(config, len(default))
    if types is None:
        types = ["sliding_attention" if slides else "full_attention" for slides in default]
    if "sliding_attention" not in types:
        return {}
    if window is None:
        raise UserError("sliding_window: missing, but layer_types has sliding_attention; set it to a number of tokens")
    return {"sliding_window": window, "layer_types": types}


def write_layer_types(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layer-type keys of config.json for Weft's model keys: the inverse of `read_layer_types`."""
    slides = "sliding_attention" in keys["layer_types"]
    return {"sliding_window": keys["sliding_window"] if slides else None, "layer_types": keys["layer_types"]}


def activation(name: Any, key: str) -> str:
    """Returns Weft's name of an activation function. Raises UserError if the function is unknown.

    Args:
        name: the name in config.json.
        key: the key of config.json, for the message.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UserError(f"{key}: unknown activation function {reprlib.repr(name)}; use {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def keep_activation_names(written: dict[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `written` with the activation names of `origin` where both names mean the same function.

    Transformers computes `gelu_new` and `gelu_pytorch_tanh` in different orders, so logits differ in the last digits.

    Args:
        written: the written config.json.
        origin: the config.json that the model was read from.
    """
    names = {key: origin[key] for key in written if key in _ACTIVATION_KEYS and isinstance(origin.get(key), str)}
    equal = {key: name for key, name in names.items() if _ACTIVATIONS.get(name) == _ACTIVATIONS.get(written[key])}
    return written | equal


def refuse(config: Mapping[str, Any], **allowed: Any) -> None:
    """Raises UserError if a key of config.json has an unsupported value.

    A missing key is supported. So is null, unless the only supported value is true: then null means false.

    Args:
        config: a config.json.
        allowed: key -> the only supported value.
    """
    for key, value in allowed.items():
        given = config.get(key, value)
        equal = given == value and isinstance(given, bool) == isinstance(value, bool)
        if not equal and (given is not None or value is True):
            raise UserError(f"{key}: {reprlib.repr(given)} is not supported; it must be {reprlib.repr(value)}")
