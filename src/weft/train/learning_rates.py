"""Computes the learning rate factors of parameters: `optimizer.lr_multipliers` and `optimizer.layer_decay`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from weft.config.run import OptimizerSection
from weft.models.parameter_patterns import last_match
from weft.optim.schedule import Schedule
from weft.parallel.apply import numbered_blocks


def learning_rate_factors(model: nn.Module, roles: Mapping[str, str], section: OptimizerSection) -> dict[str, float]:
    """Returns name -> factor of the learning rate, for all parameters of a model or of this rank's pipeline stages.

    The factor is the multiplier of the last pattern in `lr_multipliers` that matches the parameter, times the factor
    of `layer_decay` (Clark et al., "ELECTRA", 2020): with N layers, decay^(N - i) for layer i (counted from 0),
    decay^(N + 1) for embeddings, and 1 for all other parameters, such as the final norm and the head. A head that is
    tied to the embedding counts as embedding.

    Args:
        roles: parameter name -> role (`models.roles`).
    """
    decay, multipliers = section.layer_decay or 1.0, section.lr_multipliers
    blocks = numbered_blocks(model)
    depth = {parameter: of - number for block, number, of in blocks for parameter in block.parameters()}
    deepest = 1 + max((of for _, _, of in blocks), default=0)
    factors = {}
    for name, parameter in model.named_parameters():
        distance = depth.get(parameter, deepest if roles[name] == "embedding" else 0)
        pattern = last_match(name, multipliers)
        factors[name] = decay**distance * (1.0 if pattern is None else multipliers[pattern])
    return factors


def scale_learning_rates(optimizer: torch.optim.Optimizer) -> None:
    """Multiplies the learning rate of each parameter group by the group's `lr_factor`, if the group has one.

    Must be called once, after the optimizer was made: some optimizers, such as Muon, set different rates for groups.
    """
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_factor", 1.0)


class ScheduledRates:
    """Sets the learning rates of an optimizer's parameter groups: the configured rates times a schedule's factor."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule):
        self.optimizer, self.schedule = optimizer, schedule
        self.base = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Sets the rates for the update after `step` updates. Returns the optimizer's default rate times the factor."""
        factor = self.schedule(step)
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * factor
        return self.optimizer.defaults["lr"] * factor
