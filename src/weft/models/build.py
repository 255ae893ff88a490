"""From a `model:` section to a module, and what it costs."""

from __future__ import annotations

from torch import nn

from weft.config.model import CustomModelSection, ModelSection
from weft.models.decoder import Decoder


def build_model(section: ModelSection | CustomModelSection) -> nn.Module:
    """The built-in decoder, or the user's own class called with its arguments, on the current device.

    The decoder's weights are not meaningful until `weft.models.initialize.initialize` or a checkpoint fills them.
    """
    if isinstance(section, ModelSection):
        return Decoder(section)
    from weft.config.components import load_class

    return load_class(section, "model")(**section.arguments)


def matmul_parameters(model: nn.Module) -> int:
    """The number of parameters that stand in matrix products: all matrices but embedding look-ups.

    A matrix that is both (a tied head) counts once. Sharded parameters count whole. Six times this number is the
    floating-point operations of a token's forward and backward pass, attention's scores aside.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {
        id(p): p.numel()
        for m in model.modules()
        if not isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
        if p.dim() >= 2
    }
    if isinstance(model, Decoder) and model.lm_head is None:
        multiplied[id(model.embed_tokens.weight)] = model.embed_tokens.weight.numel()
    elif isinstance(model, Decoder):
        multiplied = {key: count for key, count in multiplied.items() if key not in looked_up}
    return sum(multiplied.values())
