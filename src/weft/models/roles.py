"""What each parameter is, for weight decay, learning rates and optimizers that treat matrices apart."""

from __future__ import annotations

from torch import nn

from weft.models.decoder import Decoder
from weft.models.layers.moe import Experts, Router
from weft.models.layers.norm import NORMS

NORM_TYPES = (*NORMS.values(), nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """The role of every parameter by its name: "embedding", "head", "norm", "bias", "matrix" or "other".

    Any model works: the type of the module that holds a parameter decides. A norm's bias is "norm"; a head tied to the
    embedding is "embedding"; a head is known as one only in the built-in decoder and in transformers' models. A
    stack of experts' matrices is "matrix"; a router's, which scores and transforms nothing, is "other".
    """
    roles: dict[str, str] = {}
    names = {name for name, _ in model.named_parameters()}
    head = model.lm_head if isinstance(model, Decoder) else _foreign_head(model)
    norms = (*NORM_TYPES, type(model.norm)) if isinstance(model, Decoder) else NORM_TYPES  # or a class of the user's
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if full not in names:
                continue  # another name of a shared parameter
            if isinstance(module, nn.Embedding):
                role = "embedding"
            elif isinstance(module, norms) or _named_norm(module):
                role = "norm"
            elif name == "bias" or (isinstance(module, Experts) and name.endswith("_bias")):
                role = "bias"
            elif module is head:
                role = "head"
            elif isinstance(module, Router):
                role = "other"
            else:
                role = "matrix" if parameter.dim() == 2 or isinstance(module, Experts) else "other"
            roles[full] = role
    return roles


def _foreign_head(model: nn.Module) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _named_norm(module: nn.Module) -> bool:
    """Every family of transformers has norms of its own, told by their names: LlamaRMSNorm, CohereLayerNorm, ..."""
    return type(module).__name__.removeprefix("FSDP").endswith("Norm")
