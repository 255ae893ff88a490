"""Keeping experts equally busy, by what all ranks together have given them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from weft.models.layers.experts import Router
from weft.parallel.world import World


class ExpertBalance:
    """The routers of a model, looked at after every update.

    Args:
        model: any; without routers there is nothing to do.
    """

    def __init__(self, model: nn.Module, world: World):
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.world = world

    @torch.no_grad()
    def update(self) -> float | None:
        """Move the bias of experts that had less than the mean up and of others down (Wang et al., 2024).

        Returns:
            The largest number of tokens that an expert had, as a multiple of its layer's mean; the mean over layers. 1
            is perfect balance. None without experts.
        """
        stages = self.world.stages
        if stages is not None:  # of which some may have no experts
            found = torch.tensor(self._update(), dtype=torch.float64, device=self.world.device)
            dist.all_reduce(found, group=stages)
            total, layers = found.tolist()
        else:
            total, layers = self._update()
        return total / layers if layers else None

    def _update(self) -> tuple[float, int]:
        """The sum over layers, and how many they are."""
        if not self.routers:
            return 0.0, 0
        loads = torch.stack([router.load for router in self.routers]).to(torch.float64)  # [layers, experts]
        self.world.sum_tokens(loads)
        means = loads.mean(1, keepdim=True)
        for router, load, mean in zip(self.routers, loads, means, strict=True):
            if router.correction_bias is not None and router.weight.requires_grad:  # a frozen router stays as it is
                router.correction_bias += router.config.bias_update_speed * torch.sign(mean - load)
            router.load.zero_()
        return (loads.amax(1) / means.squeeze(1).clamp(min=1)).sum().item(), len(loads)
