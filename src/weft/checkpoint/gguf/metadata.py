"""Converts a `model:` section to GGUF metadata, and metadata to the keys of a section."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import torch

from weft.checkpoint.gguf.architectures import ARCHITECTURES, Architecture
from weft.checkpoint.gguf.latent import (
    NUMBERS,
    check_latent,
    latent_metadata,
    latent_scale,
    read_latent,
    read_latent_scale,
)
from weft.checkpoint.gguf.rope import SCALING_NUMBERS, read_rope_scaling, rope_metadata
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.huggingface_weights import to_config_json

NO_CAP = 1e6  # a soft cap that changes no logit; Gemma 2 always has caps in llama.cpp
_PATTERN = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}  # llama.cpp's intervals of layers without sliding window
_CAPS = {"attn_logit_softcapping": 50.0, "logit_softcap": 30.0}  # llama.cpp's default for Gemma 2
_WINDOW_PATTERN, _VALUE_LENGTH = "attention.sliding_window_pattern", "attention.value_length"
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_NUMBERS = ("rope.dimension_count", "attention.key_length", *SCALING_NUMBERS, *NUMBERS)
_LARGEST = 2**28  # of whole numbers; sizes of matrices do not overflow
_FLOATS = ("_eps", "_theta", "_freq", "_multiplier", "_scaling", "_softcapping", "_softcap", "_max", "clip_qkv")


def architecture_of(section: ModelSection) -> Architecture:
    """Returns the architecture in which llama.cpp runs a model.

    Raises:
        UserError: llama.cpp does not run models of this family in Weft's form, or does not support a key of the
            section.
    """
    try:
        to_config_json(section)  # refuses keys that the family does not have
    except UserError as error:
        raise UserError(f"{error.what}; --to torch and --to onnx hold the model as it is", error.where) from None
    if section.num_labels:
        raise UserError("model.num_labels: a reward model has no output head for llama.cpp; use --to hf")
    if section.family not in ARCHITECTURES:
        raise UserError(
            f"model.family is {section.family!r}, which --to gguf does not support (it supports "
            f"{', '.join(sorted(ARCHITECTURES))}); use --to torch, or --to hf and llama.cpp's convert_hf_to_gguf.py"
        )
    kind, keys = ARCHITECTURES[section.family], section.resolved()
    limits = {**kind.limits, "hidden_act": kind.activations}
    if kind.square:
        limits["head_dim"] = (section.hidden_size // section.num_attention_heads,)
    if kind.only_tied:
        limits["tie_word_embeddings"] = (True,)
    if section.family == "smollm3":
        limits["no_rope_layers"] = ([int((n + 1) % 4 != 0) for n in range(section.num_hidden_layers)],)
    if section.family == "gemma3" and section.rope_scaling is not None and section.rope_local_base_freq is None:
        limits["rope_local_base_freq"] = ("a number",)
    if section.rope_scaling is not None:
        scalings = (*kind.scalings, "llama3") if kind.factors else kind.scalings
        limits["rope_scaling.rope_type"] = scalings
    for key, allowed in limits.items():
        if (value := _value(keys, key)) not in allowed:
            raise UserError(
                f"model.{key} is {value!r}, but llama.cpp's architecture {kind.name} supports only "
                f"{' or '.join(map(repr, allowed))}; use --to hf or --to torch"
            )
    if kind.name == "deepseek2":
        check_latent(section)
    return kind


def attention_scale(section: ModelSection, kind: Architecture, keys: Mapping[str, Any]) -> float:
    """Returns the factor of the dot products of queries and keys in llama.cpp, for the resolved keys of a section."""
    if kind.scale_in_keys:
        return keys["attention_multiplier"]
    return latent_scale(section, keys) if section.mla is not None else kind.attention_scale(keys)


def write_metadata(section: ModelSection, kind: Architecture) -> tuple[dict[str, Any], dict[str, torch.Tensor], list]:
    """Returns metadata by full key, tensors with factors of rotary frequencies, and warnings."""
    keys, warnings = section.resolved(), []
    found: dict[str, Any] = {}
    for key, name in kind.keys.items():
        value = _value(keys, key)
        if value is not None:
            found[name] = float(value) if key.endswith(_FLOATS) else value
    window = section.sliding_window if "sliding_attention" in keys["layer_types"] else None
    if kind.windows:
        found |= _window_metadata(kind, keys, window, found)
    elif window is not None and window < section.max_position_embeddings:
        found["context_length"] = window
        warnings.append(
            f"llama.cpp applies no sliding window in the architecture {kind.name}; the file's context length is the "
            f"window, {window:,} tokens, up to which the results are equal"
        )
    if kind.name == "gemma2":
        found |= {kind.keys[key]: NO_CAP for key in _CAPS if keys[key] is None}
    if "head_dim" in kind.keys:
        found[_VALUE_LENGTH] = section.v_head_dim
    factors: dict[str, torch.Tensor] = {}
    if section.position == "rope":
        scaling, factors = rope_metadata(section)
        found |= {"rope.dimension_count": section.rotary_dim, **scaling}
    if section.mla is not None:
        latent_metadata(section, keys, found)
    return {f"{kind.name}.{name}": value for name, value in found.items()}, factors, warnings


def _window_metadata(
    kind: Architecture, keys: Mapping[str, Any], window: int | None, found: dict[str, Any]
) -> dict[str, Any]:
    name = kind.keys["sliding_window"]
    found.pop(name, None)
    slides = [one == "sliding_attention" for one in keys["layer_types"]]
    local = {}
    if kind.name == "gemma3":
        local[kind.keys["rope_local_base_freq"]] = float(keys["rope_local_base_freq"] or keys["rope_theta"])
    if window is None:
        if kind.name == "gemma3":
            return local
        window = keys["max_position_embeddings"]  # Gemma 2 and gpt-oss always have a window in llama.cpp
    usual = [(layer + 1) % _PATTERN[kind.name] != 0 for layer in range(len(slides))]
    pattern = {} if slides == usual else {_WINDOW_PATTERN: slides}
    return {name: window, **pattern, **local}


def _value(keys: Mapping[str, Any], key: str) -> Any:
    first, _, rest = key.partition(".")
    value = keys.get(first)
    return _value(value, rest) if rest and isinstance(value, Mapping) else value


def read_section(
    metadata: Mapping[str, Any], tensors: Container[str], vocab_size: int, factors: Mapping[str, torch.Tensor]
) -> ModelSection:
    """Returns the `model:` section of a GGUF file.

    Args:
        metadata: all metadata of the file.
        tensors: names of the tensors of the file.
        vocab_size: number of rows of the embedding.
        factors: the tensors with factors of rotary frequencies.

    Raises:
        UserError: the architecture is not supported, or a key is missing.
    """
    name = str(metadata.get("general.architecture"))
    if name == "llama":
        family = "mixtral" if metadata.get("llama.expert_count") else "llama"
    else:
        known = {kind.name: kind.family for kind in ARCHITECTURES.values()}
        if name not in known:
            raise UserError(f"general.architecture is {name!r}, which is not supported; use one of {', '.join(known)}")
        gating = metadata.get("deepseek2.expert_gating_func")
        family = "deepseek_v3" if name == "deepseek2" and gating == 2 else known[name]
    kind = ARCHITECTURES[family]
    given = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    for key in {*kind.keys.values(), *_NUMBERS} & given.keys():
        value = given[key]
        if not isinstance(value, int | float) or not abs(value) < (_LARGEST if isinstance(value, int) else math.inf):
            raise UserError(f"the metadata key {name}.{key} is {str(value)[:40]}; download the file again")
    keys: dict[str, Any] = {"family": family, "vocab_size": vocab_size}
    for key, value in {**kind.always, **{key: given[one] for key, one in kind.keys.items() if one in given}}.items():
        first, _, rest = key.partition(".")
        if rest:
            keys.setdefault(first, {})[rest] = value
        else:
            keys[key] = value
    missing = [kind.keys[key] for key in _REQUIRED if key not in keys]
    if missing:
        raise UserError(f"the metadata key {name}.{missing[0]} is missing; convert the model again")
    keys.setdefault("tie_word_embeddings", "output.weight" not in tensors)
    biases = {"attention_bias": "attn_q", "attention_output_bias": "attn_output", "mlp_bias": "ffn_up"}
    for key, tensor in biases.items():
        keys.setdefault(key, f"blk.0.{tensor}.bias" in tensors)
    if kind.name == "deepseek2":
        read_latent(keys, given)
    keys |= _read_constants(kind, keys, given)
    if (scaling := read_rope_scaling(given, factors, keys)) is not None:
        keys["rope_scaling"] = scaling
    section = ModelSection(**keys)
    return section.model_copy(update=read_latent_scale(section, given)) if section.mla is not None else section


def _read_constants(kind: Architecture, keys: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys of `model:` that depend on several metadata keys or on llama.cpp's constants."""
    found: dict[str, Any] = {}
    if "rope.dimension_count" in given and "mla" not in keys:
        head = given.get("attention.key_length", keys["hidden_size"] // keys["num_attention_heads"])
        rotary = given["rope.dimension_count"]
        if rotary % 2 or not 0 < rotary <= head:
            what = f"the metadata key {kind.name}.rope.dimension_count is {rotary}"
            raise UserError(f"{what}, not an even number of at most {head}; download the file again")
        found["partial_rotary_factor"] = rotary / head
    gemma = kind.name.startswith("gemma")
    if gemma:
        found["embedding_multiplier"] = keys["hidden_size"] ** 0.5
        found["attention_multiplier"] = kind.attention_scale(ModelSection(**keys).resolved())
    if kind.name == "gemma2":
        caps = {key: keys.get(key, default) for key, default in _CAPS.items()}
        found |= {key: None if cap >= NO_CAP else cap for key, cap in caps.items()}
    if kind.windows and "sliding_window" in keys:
        pattern = given.get(_WINDOW_PATTERN, _PATTERN[kind.name])
        if isinstance(pattern, list):
            found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        else:
            found["sliding_window_pattern"] = pattern
    elif gemma:
        found["rope_local_base_freq"] = None
    return found
