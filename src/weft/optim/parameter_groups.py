"""Makes the optimizer's parameter groups: one group per parameter role."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn


def parameter_groups(model: nn.Module, roles: Mapping[str, str], no_decay: Collection[str]) -> list[dict]:
    """Groups a model's trainable parameters (`requires_grad`) by role.

    Args:
        roles: parameter name -> "embedding", "head", "norm", "bias", "matrix" or "other" (`models.roles`).
        no_decay: roles of the parameters without weight decay.

    Returns:
        Groups for a `torch.optim.Optimizer`, in the order of the model's parameters. Each group has `params` and
        `role`; groups without weight decay also have `weight_decay: 0.0`.
    """
    groups: dict[str, dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role = roles[name]
        group = groups.setdefault(role, {"params": [], "role": role})
        if role in no_decay:
            group["weight_decay"] = 0.0
        group["params"].append(parameter)
    return list(groups.values())
