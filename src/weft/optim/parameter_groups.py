"""Makes the optimizer's parameter groups: one group per parameter role and learning rate factor."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn


def parameter_groups(
    model: nn.Module, roles: Mapping[str, str], no_decay: Collection[str], factors: Mapping[str, float] | None = None
) -> list[dict]:
    """Groups a model's trainable parameters (`requires_grad`) by role and learning rate factor.

    Args:
        roles: parameter name -> "embedding", "head", "norm", "bias", "matrix" or "other" (`models.roles`).
        no_decay: roles of the parameters without weight decay.
        factors: parameter name -> factor of the learning rate; None: 1 for all parameters.

    Returns:
        Groups for a `torch.optim.Optimizer`, in the order of the model's parameters. Each group has `params` and
        `role`; groups without weight decay also have `weight_decay: 0.0`, and groups with a factor other than 1 have
        `lr_factor`. If all parameters are frozen, the only group has no parameters.
    """
    groups: dict[tuple[str, float], dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role = roles[name]
        factor = 1.0 if factors is None else factors[name]
        group = groups.setdefault((role, factor), {"params": [], "role": role})
        if factor != 1.0:
            group["lr_factor"] = factor
        if role in no_decay:
            group["weight_decay"] = 0.0
        group["params"].append(parameter)
    return list(groups.values()) or [{"params": [], "role": "other"}]
