"""Builds a module from a `model:` section, and counts its matrix parameters."""

from __future__ import annotations

from torch import nn

from weft.config.components import load_class
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.models.decoder import Decoder


def build_model(section: ModelSection | TransformersModelSection | CustomModelSection) -> nn.Module:
    """Builds the built-in decoder, a Transformers model, or a custom model.

    On the current device; a Transformers model's parameters are on the meta device. The former two are uninitialized
    until `weft.models.initialize.initialize` or a checkpoint fills them.
    """
    if isinstance(section, ModelSection):
        return Decoder(section)
    if isinstance(section, TransformersModelSection):
        from weft.models.transformers_model import build_transformers_model

        return build_transformers_model(section)
    return load_class(section, "model")(**section.arguments)


def matmul_parameters(model: nn.Module) -> int:
    """The number of parameters in matrix products: all matrices except embedding tables.

    A tied head counts once; of experts, those count that a token is routed to. Sharded parameters count in full. A
    token's forward and backward pass takes six times as many floating-point operations, without attention scores.
    """
    if isinstance(model, Decoder):
        return model.config.size().matmul
    multiplied = {
        id(p): p.numel()
        for m in model.modules()
        if not isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
        if p.dim() >= 2
    }
    return sum(multiplied.values())
