"""From a `model:` section to a module, and what it costs."""

from __future__ import annotations

from torch import nn

from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.models.decoder import Decoder


def build_model(section: ModelSection | TransformersModelSection | CustomModelSection) -> nn.Module:
    """The built-in decoder, a model of transformers, or the user's own class called with its arguments.

    On the current device; parameters of a transformers model on the meta device. Weights of these two are not
    meaningful until `weft.models.initialize.initialize` or a checkpoint fills them.
    """
    if isinstance(section, ModelSection):
        return Decoder(section)
    if isinstance(section, TransformersModelSection):
        from weft.models.transformers_model import build_transformers_model

        return build_transformers_model(section)
    from weft.config.components import load_class

    return load_class(section, "model")(**section.arguments)


def matmul_parameters(model: nn.Module) -> int:
    """The number of parameters that stand in matrix products: all matrices but embedding look-ups.

    A matrix that is both (a tied head) counts once; of experts, those count that a token goes through. Sharded
    parameters count whole. Six times this number is the floating-point operations of a token's forward and backward
    pass, attention's scores aside.
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
