"""Builds a model from a `model:` section, and counts the parameters of its matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weft.config.components import load_class
from weft.config.model import CustomModelSection, ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.models.decoder import Decoder
from weft.models.layers.blockwise import PACKED
from weft.models.layers.moe import Experts


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


def parameter_size(name: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the number of the model's parameters that the tensor `name` of `tensors` stands for.

    A quantized weight counts like the weight. Its scales, and the initial values that PiSSA keeps, do not count.

    Args:
        name: the name of the tensor.
        tensors: name -> tensor, for all parameters of the model or of the module that has the tensor.
    """
    parameter, weight = tensors[name], tensors.get(name.removesuffix("_scale"))
    of_weight = weight is not None and weight is not parameter and weight.dtype in PACKED
    if of_weight or name.endswith(("lora_a0", "lora_b0")):
        return 0
    return parameter.numel() * PACKED.get(parameter.dtype, 1)


def matmul_parameters(model: nn.Module) -> int:
    """Returns the number of parameters in matrix products: all matrices except embedding tables.

    A head that is tied to the embedding table counts once. In the built-in decoder, only the experts that a token is
    routed to count. Sharded parameters count in full. The forward and backward pass of a token takes six floating-point
    operations per parameter, without attention scores.
    """
    if isinstance(model, Decoder):
        return model.config.size().matmul
    return sum(_multiplied(model).values())


def frozen_matmul_parameters(model: nn.Module) -> int:
    """Returns the number of frozen parameters among `matmul_parameters`; of a pipeline, those of this rank's stages."""
    return sum(size for parameter, size in _multiplied(model).items() if not parameter.requires_grad)


def _multiplied(model: nn.Module) -> dict[nn.Parameter, int]:
    """Returns each matrix that is used in matrix products -> number of its parameters that a token is multiplied by.

    For stacked experts, this is the number of parameters of the experts that the token is routed to. For any other
    matrix, it is the number of all parameters.
    """
    found: dict[nn.Parameter, int] = {}
    config = model.config if isinstance(model, Decoder) else None
    head = model.embed_tokens if isinstance(model, Decoder) and model.config.tie_word_embeddings else None
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not head:
            continue
        chosen = config.moe.num_experts_per_tok if config and config.moe and isinstance(module, Experts) else None
        tensors = dict(module.named_parameters(recurse=False))
        for name, parameter in tensors.items():
            if parameter.dim() >= 2 and not name.endswith("bias"):  # experts have a bias each
                size = parameter_size(name, tensors)
                found[parameter] = size if chosen is None else size // parameter.shape[0] * chosen
    return found
