"""From a family's table to the names and tensors of one model in Hugging Face's files, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.config.huggingface_config import keys_of
from weft.config.model import ModelSection
from weft.config.moe import BALANCE
from weft.errors import UserError
from weft.families import families
from weft.families.mapping import Weight
from weft.models.decoder import Decoder

# Keys of a section that are about training, or say where the others are from: no config.json needs to hold them.
_NOT_SHAPE = {
    "type", "preset", "from_", "load_optimizer", "pad_vocab_to_multiple", "initialization", "initializer_range",
    "attention_implementation", "attention_dropout", "hidden_dropout", "embedding_dropout",
}  # fmt: skip


@dataclass(frozen=True)
class Transform:
    """How our tensor is made from theirs; or, of a stack of experts, how one expert's is.

    Attributes:
        expert: theirs is this expert's alone.
        stacked: theirs is `[expert, ...]` as ours is.
        transposed: their matrix is `[in, out]`.
        sizes: rows of each of the parts that theirs is put together from, in each of its `groups`.
        part: which of them is ours.
        groups: how often the parts follow each other in theirs: 1, or the number of heads.
    """

    transposed: bool = False
    sizes: tuple[int, ...] = ()
    part: int = 0
    groups: int = 1
    expert: int | None = None
    stacked: bool = False


def section_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported, naming the key."""
    return keys_of(dict(config))


def to_config_json(section: ModelSection) -> dict[str, Any]:
    """The config.json that transformers loads as this model.

    Raises:
        UserError: the section's family cannot say one of its keys (which is found by reading back what was written).
    """
    if section.family not in families():
        raise UserError(f"model.family: there is no family {section.family!r}; there are {', '.join(families())}")
    family = families()[section.family]
    _raise_if_own(section)
    written = {
        "architectures": [family.ARCHITECTURES[0]],
        "model_type": family.MODEL_TYPE,
        **family.to_hf(section.resolved()),
    }
    there, back = _whole(section), _whole(ModelSection(**section_of(written)))
    for key, (value, other) in _differences(there, back):
        raise UserError(
            f"model.{key} is {value!r}, and Hugging Face's {written['architectures'][0]} cannot have that beside the "
            f"other keys: there it would be {other!r}; train with that, or name a family that can"
        )
    # Which ids are special is the tokenizer's to say: transformers' defaults are those of one published model.
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **written}


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The keys, with dots where they are a part's, whose values differ."""
    for key, value in ours.items():
        other = theirs.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from ((f"{key}.{name}", pair) for name, pair in _differences(value, other))
        elif value != other:
            yield key, (value, other)


def _raise_if_own(section: ModelSection) -> None:
    """Raises UserError for parts of which transformers has no code."""
    for key in ("norm", "hidden_act", "position", "attention_implementation", "attention_pattern"):
        chosen = getattr(section, key)
        if (key == "attention_pattern" and chosen is not None) or ":" in str(chosen):
            what = repr(chosen) if isinstance(chosen, str) else f"{{type: {getattr(chosen, 'type', None)}, ...}}"
            theirs = families()[section.family].ARCHITECTURES[0]
            raise UserError(
                f"model.{key} is {what}, which Hugging Face's {theirs} has no code for; "
                "use the model where Weft is (weft.load_model)"
            )


def _whole(section: ModelSection) -> dict[str, Any]:
    """What must survive the way to a config.json and back, with defaults that follow from others filled in."""
    keys = {key: value for key, value in section.resolved().items() if key not in _NOT_SHAPE}
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


def names(section: ModelSection) -> Iterator[tuple[str, str, Transform | None]]:
    """All tensors of a section's model: our name, their tensor's name, and how ours is made from theirs.

    Several of ours with one of theirs follow each other in the order of its parts; a stack of experts of ours with many
    of theirs, in the order of the experts. A tied head is not named.

    Raises:
        UserError: a tensor that the family's table does not know.
    """
    _raise_if_own(section)
    table = {weight.name: weight for weight in families()[section.family].WEIGHTS}
    with torch.device("meta"):
        model = Decoder(section)
    order = {name: place for place, name in enumerate(table)}
    found = []
    for ours in tensors(model):
        layer = ours.split(".")[1] if ours.startswith("layers.") else ""
        generic = ours.replace(f"layers.{layer}.", "layers.{n}.", 1) if layer else ours
        stem, _, kind = generic.rpartition(".")
        weight, ending = (table[generic], "") if generic in table else (table.get(stem), f".{kind}")
        if weight is None:
            raise UserError(f"{ours}: the family {section.family!r} has no such weight in Hugging Face's files")
        transform = _transform(weight, section, is_matrix=kind != "bias" and not kind.endswith("_bias"))
        place = (int(layer) if layer else -1, kind if ending else "", order[weight.name])
        theirs = weight.hf_name.replace("{n}", layer) + ending
        if "{e}" not in theirs:
            found.append(((*place, 0), (ours, theirs, transform)))
            continue
        assert section.moe is not None
        for expert in range(section.moe.num_experts):
            one = replace(transform or Transform(), expert=expert)
            found.append(((*place, expert), (ours, theirs.replace("{e}", str(expert)), one)))
    for _, line in sorted(found, key=lambda one: one[0]):
        yield line


def tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """A decoder's parameters, and the buffers that are saved beside them."""
    saved = model.state_dict(keep_vars=True).items()
    buffers = {name: value for name, value in saved if not isinstance(value, nn.Parameter)}
    return {**dict(model.named_parameters()), **buffers}


def saved_dtype(name: str, asked: torch.dtype | None, stored: torch.dtype) -> torch.dtype:
    """What one of our tensors is saved or loaded as, where a dtype is asked for.

    A router's correction bias stays as precise as it is, as in transformers: it moves by less than bfloat16 can tell.
    """
    if asked is None or not stored.is_floating_point or name.endswith(".correction_bias"):
        return stored
    return asked


def _transform(weight: Weight, section: ModelSection, is_matrix: bool) -> Transform | None:
    """What a line of a table means for one of its tensors; None if nothing is to be done."""
    transform = Transform(transposed=weight.transposed and is_matrix, stacked=weight.stacked)
    if weight.part is not None:
        part, kinds = weight.part
        heads, rows = section.num_attention_heads, section.num_attention_heads * section.qk_head_dim
        inner = section.inner_width
        sizes = tuple({"q": rows, "kv": section.kv_heads * section.qk_head_dim, "inner": inner}[k] for k in kinds)
        groups = heads if weight.by_head else inner if weight.alternating else 1
        transform = replace(transform, sizes=tuple(size // groups for size in sizes), part=part, groups=groups)
    return None if transform == Transform() else transform


def convert(section: ModelSection, theirs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors from theirs, by their names in files. Raises KeyError for one that is not there."""
    found: dict[str, list[torch.Tensor]] = {}
    experts = set()
    for ours, name, transform in names(section):
        found.setdefault(ours, []).append(apply(transform, theirs[name]))
        if transform is not None and transform.expert is not None:
            experts.add(ours)
    return {name: torch.stack(parts) if name in experts else parts[0] for name, parts in found.items()}


def apply(transform: Transform | None, theirs: torch.Tensor) -> torch.Tensor:
    """Our tensor from theirs, or one expert's; a view where it can be one."""
    if transform is None:
        return theirs
    if transform.stacked:
        return torch.stack([apply(replace(transform, stacked=False), one) for one in theirs])
    if transform.transposed:
        theirs = theirs.T
    if not transform.sizes:
        return theirs
    rest = theirs.shape[1:]
    parts = theirs.reshape(transform.groups, -1, *rest).split(transform.sizes, dim=1)
    return parts[transform.part].reshape(-1, *rest)


def invert(transform: Transform | None, ours: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their tensor from ours, all of them that it is put together from, in the order of `names`.

    Of a tensor of one expert, ours is that expert's.
    """
    if transform is None:
        return ours[0]
    if transform.stacked:
        return torch.stack([invert(replace(transform, stacked=False), one) for one in zip(*ours, strict=True)])
    theirs = ours[0]
    if transform.sizes:
        rest = theirs.shape[1:]
        parts = [tensor.reshape(transform.groups, -1, *rest) for tensor in ours]
        theirs = torch.cat(parts, dim=1).reshape(-1, *rest)
    return theirs.T.contiguous() if transform.transposed else theirs
