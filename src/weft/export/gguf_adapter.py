"""Converts the adapter of a run to the tensors of a GGUF adapter."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.adapter_weights import read_adapter
from weft.checkpoint.gguf.architectures import Architecture
from weft.checkpoint.gguf.metadata import attention_scale
from weft.checkpoint.gguf.tensors import layout, tensor_names
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.initialize import on_meta
from weft.models.low_rank import LowRank


def adapter_tensors(source: Path, section: ModelSection, kind: Architecture) -> dict[str, torch.Tensor]:
    """Returns the matrices A and B of each adapted weight, by their names in a GGUF file.

    The scale of the adapter is multiplied into B. If llama.cpp has one weight for several of Weft's (such as GPT-2's
    queries, keys and values), their ranks add up.

    Raises:
        UserError: the checkpoint has no adapter, or a GGUF adapter cannot express it.
    """
    if section.mla is not None:
        raise UserError(
            "llama.cpp applies no adapter to latent attention; leave --adapter-only out to merge it", source
        )
    record = read_adapter_record(source)
    if record is None:
        raise UserError("this model has no adapter; leave --adapter-only out", source)
    layers = read_adapter(source, record.section)
    keys = section.resolved()
    ratio = keys["attention_multiplier"] / attention_scale(section, kind, keys)
    with on_meta():
        shapes = {name: one.shape for name, one in Decoder(section).named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for name, ours in tensor_names(section, kind).items():
        changes = {one: layers.pop(one.removesuffix(".weight"), None) for one in ours if not one.endswith(".bias")}
        if not any(changes.values()):
            continue
        pairs = []
        for one, change in changes.items():
            before = list(changes).index(one)
            rows = [shapes[other][-2] for other in changes]
            if change is None:
                continue
            scaled = ratio if "attention.q_proj." in one and not section.qk_norm else 1.0
            a, b = _products(source, one, change)
            b = layout(section, kind, one, b, back=False) * scaled
            padded = [b.new_zeros(size, b.shape[-1]) for size in rows] if b.dim() == 2 else [b]
            padded[before] = b
            pairs.append((a, torch.cat(padded)))
        found[f"{name}.lora_a"] = torch.cat([a for a, _ in pairs], -2)
        found[f"{name}.lora_b"] = torch.cat([b for _, b in pairs], -1)
    if layers:
        name = next(iter(layers))
        raise UserError(f"{name}: this adapted weight has no place in llama.cpp; merge the adapter", source)
    return found


def _products(source: Path, name: str, change: LowRank) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A, and B times the scale, in float32."""
    if change.magnitude is not None:
        raise UserError(f"{name}: a GGUF adapter cannot express DoRA; leave --adapter-only out to merge it", source)
    return change.a.float(), change.b.float() * change.scale
