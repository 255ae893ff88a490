"""Parameter roles, which determine weight decay, learning rates, and which parameters Muon updates."""

from __future__ import annotations

from torch import nn

from weft.models.decoder import Decoder
from weft.models.layers.moe import Experts, Router
from weft.models.layers.norm import NORMS

NORM_TYPES = (*NORMS.values(), nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Maps each parameter name to "embedding", "head", "norm", "bias", "matrix" or "other".

    The role depends mostly on the type of the module that contains the parameter. The bias of a norm has
    the role "norm", and a head that is tied to the embedding has the role "embedding". Heads are recognized in the
    built-in decoder and in Transformers models. Stacked expert matrices have the role "matrix", and a router's weight
    has the role "other".
    """
    roles: dict[str, str] = {}
    names = {name for name, _ in model.named_parameters()}
    if isinstance(model, Decoder):
        head, norms = (
            model.lm_head or model.score,
            (*NORM_TYPES, type(model.norm)),
        )  # the norm may be a custom component
    else:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        norms = NORM_TYPES
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if full not in names:
                continue  # a second name of a shared parameter
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


def _named_norm(module: nn.Module) -> bool:
    """Whether a module's class name ends with Norm, such as LlamaRMSNorm of Transformers' Llama."""
    return type(module).__name__.removeprefix("FSDP").endswith("Norm")
