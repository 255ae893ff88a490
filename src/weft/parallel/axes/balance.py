"""Balances the load of experts by biases instead of an auxiliary loss (Wang et al., 2024)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from weft.models.decoder import Decoder
from weft.models.layers.moe import Router
from weft.parallel.world import World


class ExpertBalance:
    """Updates the expert biases of a model's routers after each optimizer step. Does nothing without routers."""

    def __init__(self, model: nn.Module, world: World):
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.world = world
        # A pipeline stage may have none of the model's routers.
        self.pp_group = world.pp_group if isinstance(model, Decoder) and model.config.moe is not None else None

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Raises the bias of experts whose load is below the mean load, and lowers it for experts above the mean.

        The load is summed over all ranks. Routers without a bias, and frozen routers, are not changed.

        Returns:
            Metrics, {} without experts. `expert_load`: the highest load of an expert divided by the mean load of its
            layer, averaged over layers; 1 is perfect balance. If experts have a capacity, also `dropped`: the fraction
            of choices (pairs of token and expert) that were dropped because the expert's capacity was exceeded.
        """
        found = torch.tensor(self._update(), dtype=torch.float64)
        if self.pp_group is not None:
            found = found.to(self.world.device)
            dist.all_reduce(found, group=self.pp_group)
        load, layers, chosen, dropped, limited = found.tolist()
        if not layers:
            return {}
        return {"expert_load": load / layers} | ({"dropped": dropped / max(chosen, 1)} if limited else {})

    def _update(self) -> list[float]:
        """Updates the expert biases of the routers of this stage, and clears the counts in these routers.

        Returns:
            Five totals over the layers of this stage: (highest load of an expert) / (mean load), number of layers,
            number of choices (pairs of token and expert), number of dropped choices, number of layers with a capacity.
        """
        if not self.routers:
            return [0.0] * 5
        counts = torch.stack([torch.stack((router.load, router.dropped_counts)) for router in self.routers]).double()
        self.world.sum_tokens(counts)  # [layers, 2, experts]
        loads, dropped = counts.unbind(1)
        means = loads.mean(1, keepdim=True)
        for router, load, mean in zip(self.routers, loads, means, strict=True):
            if router.correction_bias is not None and router.weight.requires_grad:  # a frozen router keeps its bias
                router.correction_bias += router.config.bias_update_speed * torch.sign(mean - load)
            router.load.zero_()
            router.dropped_counts.zero_()
        highest = (loads.amax(1) / means.squeeze(1).clamp(min=1)).sum()
        limited = sum(router.config.capacity_factor is not None for router in self.routers)
        return [highest.item(), len(loads), loads.sum().item(), dropped.sum().item(), limited]
