"""From a family's table to the names and tensors of one model in Hugging Face's files, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.config.errors import UserError
from weft.config.huggingface import families, family_of
from weft.config.model import ModelSection
from weft.config.size import inner_width
from weft.models.decoder import Decoder
from weft.models.mapping import attention_multiplier

# Keys of a section that are about training, or say where the others are from: no config.json needs to hold them.
_NOT_SHAPE = {
    "type", "preset", "from_", "load_optimizer", "initialization", "initializer_range",
    "attention_dropout", "hidden_dropout", "embedding_dropout",
}  # fmt: skip


@dataclass(frozen=True)
class Transform:
    """How our tensor is made from theirs.

    Attributes:
        transposed: their matrix is `[in, out]`.
        sizes: rows of each of the parts that theirs is put together from, in each of its `groups`.
        part: which of them is ours.
        groups: how often the parts follow each other in theirs: 1, or the number of heads.
    """

    transposed: bool = False
    sizes: tuple[int, ...] = ()
    part: int = 0
    groups: int = 1


def section_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `ModelSection` for a config.json. Raises UserError for what is not supported, naming the key."""
    return family_of(config).from_hf(dict(config))


def config_of(section: ModelSection) -> dict[str, Any]:
    """The config.json that transformers loads as this model.

    Raises:
        UserError: the section's family cannot say one of its keys (which is found by reading back what was written).
    """
    if section.family not in families():
        raise UserError(f"model.family: there is no family {section.family!r}; there are {', '.join(families())}")
    written = families()[section.family].to_hf(section)
    there, back = _whole(section), _whole(ModelSection(**section_of(written)))
    for key, value in there.items():
        if value != back.get(key):
            raise UserError(
                f"model.{key} is {value!r}, and Hugging Face's {written['architectures'][0]} cannot have that "
                f"(there it is {back.get(key)!r}); name a family that can"
            )
    # Which ids are special is the tokenizer's to say: transformers' defaults are those of one published model.
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **written}


def _whole(section: ModelSection) -> dict[str, Any]:
    """What must survive the way to a config.json and back, with defaults that follow from others filled in."""
    keys = {key: value for key, value in section.model_dump().items() if key not in _NOT_SHAPE}
    heads = section.num_attention_heads
    keys["num_key_value_heads"] = section.num_key_value_heads or heads
    keys["head_dim"] = section.head_dim or section.hidden_size // heads
    keys["intermediate_size"] = inner_width(section)
    keys["attention_multiplier"] = round(attention_multiplier(section), 9)
    keys["attention_output_bias"] = section.output_bias
    layers = range(section.num_hidden_layers)
    keys["layer_types"] = [section.slides(layer) for layer in layers]
    keys["no_rope_layers"] = [section.rotates(layer) for layer in layers]
    del keys["sliding_window_pattern"], keys["no_rope_layer_interval"]
    if not any(keys["layer_types"]):
        keys["sliding_window"] = keys["rope_local_base_freq"] = None
    elif section.rope_local_base_freq == section.rope_theta and section.rope_scaling is None:
        keys["rope_local_base_freq"] = None
    if not any(keys["no_rope_layers"]):
        keys["rope_theta"] = None
    if not section.qk_norm:
        del keys["qk_norm_over"]
    return keys


def names(section: ModelSection) -> Iterator[tuple[str, str, Transform | None]]:
    """All parameters of a section's model: our name, their tensor's name, and how ours is made from theirs.

    Several of ours with one of theirs follow each other in the order of its parts. A tied head is not named.

    Raises:
        UserError: a parameter that the family's table does not know.
    """
    table = {weight.ours: weight for weight in families()[section.family].WEIGHTS}
    sizes = _sizes(section)
    with torch.device("meta"):
        model = Decoder(section)
    ours_in_order = list(dict(model.named_parameters()))
    order = {name: place for place, name in enumerate(table)}
    found = []
    for ours in ours_in_order:
        stem, _, kind = ours.rpartition(".")
        layer = stem.split(".")[1] if stem.startswith("layers.") else ""
        generic = stem.replace(f"layers.{layer}.", "layers.{n}.", 1) if layer else stem
        if generic not in table:
            raise UserError(f"{ours}: the family {section.family!r} has no such weight in Hugging Face's files")
        weight = table[generic]
        transform = None
        transposed = weight.transposed and kind == "weight"
        if weight.part is not None:
            part, kinds = weight.part
            groups = section.num_attention_heads if weight.by_head else 1
            transform = Transform(transposed, tuple(sizes[k] // groups for k in kinds), part, groups)
        elif transposed:
            transform = Transform(transposed)
        place = (int(layer) if layer else -1, kind, order[generic])
        found.append((place, (ours, f"{weight.theirs.format(n=layer)}.{kind}", transform)))
    for _, line in sorted(found, key=lambda one: one[0]):
        yield line


def _sizes(section: ModelSection) -> dict[str, int]:
    """Rows of the kinds of parts that `Weight.part` names."""
    heads = section.num_attention_heads
    head = section.head_dim or section.hidden_size // heads
    groups = section.num_key_value_heads or heads
    return {"q": heads * head, "kv": groups * head, "inner": inner_width(section)}


def apply(transform: Transform | None, theirs: torch.Tensor) -> torch.Tensor:
    """Our tensor from theirs; a view where it can be one."""
    if transform is None:
        return theirs
    if transform.transposed:
        theirs = theirs.T
    if not transform.sizes:
        return theirs
    rest = theirs.shape[1:]
    parts = theirs.reshape(transform.groups, -1, *rest).split(transform.sizes, dim=1)
    return parts[transform.part].reshape(-1, *rest)


def invert(transform: Transform | None, ours: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their tensor from ours, all of them that it is put together from, in the order of `names`."""
    if transform is None:
        return ours[0]
    theirs = ours[0]
    if transform.sizes:
        rest = theirs.shape[1:]
        parts = [tensor.reshape(transform.groups, -1, *rest) for tensor in ours]
        theirs = torch.cat(parts, dim=1).reshape(-1, *rest)
    return theirs.T.contiguous() if transform.transposed else theirs
