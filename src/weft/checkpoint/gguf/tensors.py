"""Names and layouts of a model's tensors in a GGUF file."""

from __future__ import annotations

import torch

from weft.checkpoint.gguf.architectures import Architecture
from weft.checkpoint.gguf.latent import latent_layout
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.huggingface_weights import saved_tensors
from weft.models.initialize import on_meta

OUTPUT, EMBEDDING = "output.weight", "embed_tokens.weight"


def tensor_names(section: ModelSection, kind: Architecture) -> dict[str, tuple[str, ...]]:
    """Returns GGUF's name of each tensor -> Weft's names of the tensors that it concatenates.

    Raises:
        UserError: the architecture has no place for a tensor of the model.
    """
    with on_meta():
        names = list(saved_tensors(Decoder(section)))
    places: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for stem, ours in kind.tensors.items():
        for name in ours:
            places.setdefault(name, []).append((stem, ours))
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        generic = name.replace(f"layers.{layer}.", "layers.{n}.", 1) if layer else name
        module, _, ending = generic.rpartition(".")
        if generic in places:  # a single tensor, such as stacked experts
            module, suffix = generic, ""
            ending = "bias" if places[generic][0][0].endswith(".bias") else "weight"
        elif module in places:
            suffix = f".{ending}"
        else:
            raise UserError(f"{name}: llama.cpp's architecture {kind.name} has no such tensor; use --to hf")
        for stem, parts in places[module]:
            ours = tuple(part.replace("{n}", layer) + suffix for part in parts)
            found[f"{stem.removesuffix('.bias').replace('{n}', layer)}.{ending}"] = ours
    if kind.own_output:
        found.setdefault(OUTPUT, (EMBEDDING,))
    return found


def layout(section: ModelSection, kind: Architecture, name: str, tensor: torch.Tensor, *, back: bool) -> torch.Tensor:
    """Converts a tensor between Weft's layout and GGUF's.

    Queries and keys of interleaved architectures have their rows in another order. The weights of norms with scale
    1 + weight are stored as 1 + weight.

    Args:
        name: Weft's name of the tensor.
        tensor: the tensor; of an adapter, the matrix B of `name`.
        back: whether to convert from GGUF's layout to Weft's.
    """
    if section.mla is not None:
        return latent_layout(section, name, tensor, back=back)
    heads = {"q_proj": section.num_attention_heads, "k_proj": section.kv_heads}.get(name.split(".")[-2])
    if kind.interleaved and heads:
        shape = (heads, -1, 2) if back else (heads, 2, tensor.shape[0] // heads // 2)
        return tensor.reshape(*shape, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if section.norm == "rmsnorm1p" and name.endswith("norm.weight"):
        return tensor - 1 if back else tensor + 1
    return tensor
