"""Keeping experts equally busy, by what all ranks together have given them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from weft.models.decoder import Decoder
from weft.models.layers.moe import Router
from weft.parallel.world import World


class ExpertBalance:
    """The routers of a model, looked at after every update.

    Args:
        model: any; without routers there is nothing to do.
    """

    def __init__(self, model: nn.Module, world: World):
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.world = world
        # Of a pipeline's stages some may have none of the model's experts.
        self.stages = world.stages if isinstance(model, Decoder) and model.config.moe is not None else None

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Move the bias of experts that had less than the mean up and of others down (Wang et al., 2024).

        Returns:
            `expert_load`: the largest number of tokens that chose an expert, as a multiple of its layer's mean; the
            mean over layers. 1 is perfect balance. With a capacity `dropped`: the share of choices that had no room.
            Without experts nothing.
        """
        found = torch.tensor(self._update(), dtype=torch.float64)
        if self.stages is not None:
            found = found.to(self.world.device)
            dist.all_reduce(found, group=self.stages)
        load, layers, chosen, lost, limited = found.tolist()
        if not layers:
            return {}
        return {"expert_load": load / layers} | ({"dropped": lost / max(chosen, 1)} if limited else {})

    def _update(self) -> list[float]:
        """Of this stage's layers: the sum of their loads, how many they are, choices, those lost, those with limits."""
        if not self.routers:
            return [0.0] * 5
        counts = torch.stack([torch.stack((router.load, router.dropped_counts)) for router in self.routers]).to(
            torch.float64
        )
        self.world.sum_tokens(counts)  # [layers, 2, experts]
        loads, lost = counts.unbind(1)
        means = loads.mean(1, keepdim=True)
        for router, load, mean in zip(self.routers, loads, means, strict=True):
            if router.correction_bias is not None and router.weight.requires_grad:  # a frozen router stays as it is
                router.correction_bias += router.config.bias_update_speed * torch.sign(mean - load)
            router.load.zero_()
            router.dropped_counts.zero_()
        most = (loads.amax(1) / means.squeeze(1).clamp(min=1)).sum()
        limited = sum(router.config.capacity_factor is not None for router in self.routers)
        return [most.item(), len(loads), loads.sum().item(), lost.sum().item(), limited]
