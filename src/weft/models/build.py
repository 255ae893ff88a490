"""Builds a model from a `model:` section, and counts the parameters of its matrices."""

from __future__ import annotations

from torch import nn

from weft.config.components import load_class
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.models.decoder import Decoder


def build_model(section: ModelSection | TransformersModelSection | CustomModelSection) -> nn.Module:
    """Builds the built-in decoder, a Transformers model, or a custom model.

    The model is on the current device, except that a Transformers model's parameters are on the meta device. A decoder
    or Transformers model is uninitialized until `weft.models.initialize.initialize` or a checkpoint fills it.
    """
    if isinstance(section, ModelSection):
        return Decoder(section)
    if isinstance(section, TransformersModelSection):
        from weft.models.transformers_model import build_transformers_model

        return build_transformers_model(section)
    return load_class(section, "model")(**section.arguments)


def matmul_parameters(model: nn.Module) -> int:
    """Returns the number of parameters in matrix products: all matrices except embedding tables.

    A head that is tied to the embedding table counts once. In the built-in decoder, only the experts that a token is
    routed to count. Sharded parameters count in full. The forward and backward pass of a token takes six floating-point
    operations per parameter, without attention scores.
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
