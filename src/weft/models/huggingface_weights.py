"""Maps the built-in decoder to Hugging Face's config.json and tensors, with the tables of the model's family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.config.huggingface_config import check_table, model_keys
from weft.config.model import ModelSection
from weft.config.model_sections import BALANCE
from weft.errors import UserError
from weft.families import classifier_of, families
from weft.families.mapping import Weight
from weft.models.decoder import Decoder
from weft.models.initialize import on_meta

# Keys of `model:` that concern training or the origin of other keys. A config.json need not contain them.
NOT_ARCHITECTURE = {
    "type", "preset", "from_", "load_optimizer", "pad_vocab_to_multiple", "initialization", "initializer_range",
    "attention_implementation", "attention_dropout", "hidden_dropout", "embedding_dropout",
}  # fmt: skip


@dataclass(frozen=True)
class Transform:
    """The steps that convert a tensor stored in a Hugging Face file to Weft's tensor.

    If `expert` is not None, the result is one expert's matrix of Weft's tensor, which stacks the matrices of all
    experts.

    Attributes:
        transposed: whether the stored matrix is `[in, out]`.
        sizes: if the stored tensor concatenates several of Weft's tensors, the number of rows of each of them in one
            group; otherwise empty.
        part: index of Weft's tensor among the concatenated tensors.
        groups: number of groups of rows; each group has rows of all concatenated tensors, one tensor after another.
            This is 1, the number of heads, or the intermediate size.
        expert: index of the expert that the stored tensor belongs to; None if it does not belong to a single expert.
        stacked: whether the stored tensor is `[experts, ...]`, like Weft's tensor.
    """

    transposed: bool = False
    sizes: tuple[int, ...] = ()
    part: int = 0
    groups: int = 1
    expert: int | None = None
    stacked: bool = False


def to_config_json(section: ModelSection) -> dict[str, Any]:
    """Returns the config.json with which Transformers loads the model of a `model:` section.

    Raises:
        UserError: the section's family is unknown, or the family's config.json cannot express one of the section's
            keys. The function checks this by converting the result back to a section.
    """
    if section.family not in families():
        raise UserError(f"model.family: unknown family {section.family!r}; use one of {', '.join(families())}")
    family = families()[section.family]
    check_table(family)
    _refuse_custom_components(section)
    architecture = family.ARCHITECTURES[0]
    if section.num_labels and (architecture := classifier_of(family)) is None:
        raise UserError(
            f"model.num_labels: Transformers has no reward models of the family {section.family}; load the model with "
            "Weft (weft.load_model)"
        )
    written = {
        "architectures": [architecture],
        "model_type": family.MODEL_TYPE,
        **family.to_hf(section.resolved()),
        **({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if section.num_labels else {}),
    }
    expected, read_back = _architecture(section), _architecture(ModelSection(**model_keys(dict(written))))
    for key, value, other in _differences(expected, read_back):
        raise UserError(
            f"model.{key} is {value!r}, which Hugging Face's {written['architectures'][0]} does not support with the "
            f"other keys: Transformers would use {other!r}; train with {other!r}, or set model.family to a family that "
            f"supports {value!r}"
        )
    # Special token ids come from the tokenizer: Transformers' defaults are the ids of one published model.
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **written}


def _differences(ours: dict[str, Any], others: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value in `ours`, value in `others`) for each key whose values differ. Nested keys have dots."""
    for key, value in ours.items():
        other = others.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from ((f"{key}.{name}", *pair) for name, *pair in _differences(value, other))
        elif value != other:
            yield key, value, other


def _refuse_custom_components(section: ModelSection) -> None:
    """Raises UserError if the section has a component that Transformers has no code for."""
    for key in ("norm", "hidden_act", "position", "attention_implementation", "attention_pattern"):
        chosen = getattr(section, key)
        if (key == "attention_pattern" and chosen is not None) or ":" in str(chosen):
            what = repr(chosen) if isinstance(chosen, str) else f"{{type: {getattr(chosen, 'type', None)}, ...}}"
            raise UserError(
                f"model.{key} is {what}, for which Hugging Face's {families()[section.family].ARCHITECTURES[0]} has no "
                "code; load the model with Weft (weft.load_model)"
            )


def _architecture(section: ModelSection) -> dict[str, Any]:
    """Returns the keys and values that a config.json must express: those that determine the model's computation.

    Values that have no effect are None or left out. Keys that are not set have their defaults.
    """
    keys = {key: value for key, value in section.resolved().items() if key not in NOT_ARCHITECTURE}
    keys["attention_multiplier"] = round(keys["attention_multiplier"], 9)
    del keys["sliding_window_pattern"], keys["no_rope_layer_interval"]
    if "sliding_attention" not in keys["layer_types"]:
        keys["sliding_window"] = keys["rope_local_base_freq"] = None
    elif section.rope_local_base_freq == section.rope_theta and section.rope_scaling is None:
        keys["rope_local_base_freq"] = None
    if not any(keys["no_rope_layers"]):
        keys["rope_theta"] = None
    if not section.qk_norm:
        del keys["qk_norm_over"]
    if section.position != "alibi":
        del keys["alibi_bias_max"]
    if section.norm != "layernorm":
        del keys["norm_bias"]
    if section.moe is not None:
        keys["moe"] = {key: value for key, value in keys["moe"].items() if key not in BALANCE}
        keys["moe"]["layers"] = [section.has_experts(layer) for layer in range(section.num_hidden_layers)]
        if all(keys["moe"]["layers"]):
            del keys["intermediate_size"]  # no layer has an MLP
        for key in ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"):
            del keys["moe"][key]
    return keys


def tensor_mapping(section: ModelSection) -> Iterator[tuple[str, str, Transform | None]]:
    """Yields (Weft's name, Hugging Face's name, transform) for every tensor of the model of a `model:` section.

    If a Hugging Face file concatenates several of Weft's tensors, their entries are consecutive, in the order of
    concatenation. If a file stores one tensor per expert, the entries of these tensors are consecutive, in the order of
    the experts. A tied head has no entry. The copies of embedding and head that some families' files have for each
    multi-token prediction layer come last.

    Raises:
        UserError: the family's table has no entry for a tensor, or the model has a custom component.
    """
    _refuse_custom_components(section)
    table = {weight.name: weight for weight in (*families()[section.family].WEIGHTS, Weight("score", "score"))}
    with on_meta():
        model = Decoder(section)
    order = {name: index for index, name in enumerate(table)}
    entries = []
    for name in saved_tensors(model):
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        generic = name.replace(f"layers.{layer}.", "layers.{n}.", 1) if layer else name
        stem, _, kind = generic.rpartition(".")
        weight, ending = (table[generic], "") if generic in table else (table.get(stem), f".{kind}")
        if weight is None:
            raise UserError(f"{name}: the family {section.family!r} has no such weight; set another model.family")
        transform = _transform(weight, section, is_matrix=kind != "bias" and not kind.endswith("_bias"))
        place = (int(layer) if layer else -1, kind if ending else "", order[weight.name])
        hf_name = weight.hf_name.replace("{n}", layer) + ending
        if "{e}" not in hf_name:
            entries.append(((*place, 0), (name, hf_name, transform)))
            continue
        assert section.moe is not None
        for expert in range(section.moe.num_experts):
            of_expert = replace(transform or Transform(), expert=expert)
            entries.append(((*place, expert), (name, hf_name.replace("{e}", str(expert)), of_expert)))
    for _, entry in sorted(entries, key=lambda entry: entry[0]):
        yield entry
    names = {name for _, (name, *_) in entries}
    for layer in range(section.num_hidden_layers, section.all_layers):
        for name, copy in getattr(families()[section.family], "PREDICTION_COPIES", {}).items():
            if name in names:
                yield name, copy.replace("{n}", str(layer)), None


def saved_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """Returns a decoder's parameters and persistent buffers by name."""
    saved = model.state_dict(keep_vars=True).items()
    buffers = {name: value for name, value in saved if not isinstance(value, nn.Parameter)}
    return {**dict(model.named_parameters()), **buffers}


def saved_dtype(name: str, requested: torch.dtype | None, stored: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a tensor is saved or loaded.

    A router's correction bias keeps its dtype, as in Transformers, because bfloat16 is too coarse for its updates.

    Args:
        name: name of the tensor.
        requested: dtype for floating-point tensors; None keeps the dtype.
        stored: present dtype of the tensor.
    """
    if requested is None or not stored.is_floating_point or name.endswith(".correction_bias"):
        return stored
    return requested


def _transform(weight: Weight, section: ModelSection, is_matrix: bool) -> Transform | None:
    """Returns the transform that a family's weight table defines for a tensor; None if the tensor is stored unchanged.

    Args:
        weight: the tensor's entry in the table.
        section: the `model:` section, which determines the sizes.
        is_matrix: whether the tensor is not a bias. Biases are never transposed.
    """
    transform = Transform(transposed=weight.transposed and is_matrix, stacked=weight.stacked)
    if weight.part is not None:
        part, kinds = weight.part
        heads, inner = section.num_attention_heads, section.inner_width
        rows = {"q": heads * section.qk_head_dim, "kv": section.kv_heads * section.qk_head_dim, "inner": inner}
        groups = heads if weight.by_head else inner if weight.alternating else 1
        sizes = tuple(rows[kind] // groups for kind in kinds)
        transform = replace(transform, sizes=sizes, part=part, groups=groups)
    return None if transform == Transform() else transform


def invert(transform: Transform | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Converts Weft's tensors to the tensor that a Hugging Face file stores; the inverse of a transform.

    Args:
        transform: the transform of the stored tensor; None: the identity.
        tensors: all of Weft's tensors that the stored tensor consists of, in the order of `tensor_mapping`. If the
            stored tensor belongs to one expert, these are the matrices of that expert.
    """
    if transform is None:
        return tensors[0]
    if transform.stacked:
        return torch.stack([invert(replace(transform, stacked=False), one) for one in zip(*tensors, strict=True)])
    stored = tensors[0]
    if transform.sizes:
        rest = stored.shape[1:]
        parts = [tensor.reshape(transform.groups, -1, *rest) for tensor in tensors]
        stored = torch.cat(parts, dim=1).reshape(-1, *rest)
    return stored.T.contiguous() if transform.transposed else stored
