"""Balances the load of experts by biases instead of an auxiliary loss (Wang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._loads: torch.Tensor | None = None

    @torch.no_grad()
    def measure(self) -> torch.Tensor:
        """Sums the counts of routed tokens over all ranks, and clears them. The host does not wait for the device.

        Returns:
            A float64 vector on the device, for `metrics`; empty if the model has no routers. Five totals over the
            layers of all stages: (highest load of an expert) / (mean load), number of layers, number of choices (pairs
            of token and expert), number of dropped choices, number of layers with a capacity.
        """
        device = self.world.device
        totals = torch.zeros(5 if self.routers or self.pp_group else 0, dtype=torch.float64, device=device)
        if self.routers:
            counts = torch.stack([torch.stack((r.load, r.dropped_counts)) for r in self.routers]).double()
            self.world.sum_tokens(counts)  # [layers, 2, experts]
            self._loads, dropped = counts.unbind(1)
            highest = self._loads.amax(1) / self._loads.mean(1).clamp(min=1)
            totals[0], totals[1] = highest.sum(), len(self.routers)
            totals[2], totals[3] = self._loads.sum(), dropped.sum()
            totals[4] = sum(router.config.capacity_factor is not None for router in self.routers)
            for router in self.routers:
                router.load.zero_()
                router.dropped_counts.zero_()
        if self.pp_group is not None:
            dist.all_reduce(totals, group=self.pp_group)
        return totals

    @torch.no_grad()
    def update(self) -> None:
        """Raises the bias of experts whose load is below the mean load, and lowers it for experts above the mean.

        Must be called after `measure`, whose loads it uses. Does not change routers without a bias, and frozen routers.
        """
        if self._loads is None:
            return
        for router, load in zip(self.routers, self._loads, strict=True):
            if router.correction_bias is not None and router.weight.requires_grad:  # a frozen router keeps its bias
                router.correction_bias += router.config.bias_update_speed * torch.sign(load.mean() - load)

    @staticmethod
    def metrics(totals: Sequence[float]) -> dict[str, float]:
        """Returns the metrics of a step, {} without experts.

        `expert_load`: the highest load of an expert divided by the mean load of its layer, averaged over layers; 1 is
        perfect balance. If experts have a capacity, also `dropped`: the fraction of choices (pairs of token and expert)
        that were dropped because the expert's capacity was exceeded.

        Args:
            totals: the values of `measure`.
        """
        if not totals or not totals[1]:
            return {}
        load, layers, chosen, dropped, limited = totals
        return {"expert_load": load / layers} | ({"dropped": dropped / max(chosen, 1)} if limited else {})
