"""Adds an adapter to a model before sharding, and sets the adapter's initial values after sharding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.adapter import AdapterSection, adapted_layers, decoder_layers, is_stacked
from weft.config.model import ModelSection
from weft.models.adapter import add_adapter, initial_adapter_value, is_adapter
from weft.models.decoder import Decoder
from weft.models.layers.blockwise import dequantize_blocks
from weft.models.layers.lora import Lora, has_quantized_weight
from weft.parallel.local_parameters import local, set_full_value, shard_part
from weft.parallel.model_state import ModelPlan, ModelState
from weft.parallel.ranks import error_on_all_ranks

_OVERSAMPLING = 64  # additional dimensions of the subspace, which make the largest singular values accurate


def adapt(model: nn.Module, state: ModelState) -> nn.Module:
    """If `adapter` is set, adds the adapter's parameters, and freezes all others. Assumes plain parameters."""
    plan = state.plan
    if plan.adapter is None:
        return model
    if state.world.shape.tp > 1 and not isinstance(model, Decoder):
        raise error_on_all_ranks(
            "adapter: with parallel.tp, only the built-in decoder can have one; set parallel.tp: 1"
        )
    layers = None
    if isinstance(plan.model, ModelSection):  # a pipeline stage has only some of the layers
        found = decoder_layers(plan.model)
        layers = adapted_layers(plan.adapter, found, [name for name in found if is_stacked(name)])
    add_adapter(model, plan.adapter, names=layers, wrap=state.wrap)
    return model


def fill_adapter(model: nn.Module, plan: ModelPlan) -> None:
    """Initializes the adapter's parameters, independently of the mesh.

    Values that depend on the base model stay unset, until `fill_from_base`.
    """
    assert plan.adapter is not None
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            value = initial_adapter_value(name, parameter.shape, plan.adapter, plan.seed, parameter.dtype)
            if value is not None:
                set_full_value(parameter, value)


@torch.no_grad()
def fill_from_base(model: nn.Module, section: AdapterSection) -> None:
    """Sets the initial values that depend on the base model: DoRA's magnitudes, and A and B of PiSSA.

    Must be called after the weights of the base model are loaded. Gathers one weight at a time. With PiSSA,
    `subtract_initial_product` must be called afterwards.
    """
    for linear in _adapted(model):
        if section.dora:
            weight = _full_weight(linear)
            wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
            set_full_value(linear.lora_magnitude, torch.linalg.vector_norm(wide, dim=1))
        if section.init == "pissa":
            a, b = principal_factors(_full_weight(linear), section.r)
            root = section.scale**-0.5
            for name, value in (("lora_a", a * root), ("lora_b", b * root)):
                set_full_value(getattr(linear, name), value)
                set_full_value(getattr(linear, f"{name}0"), value)


def principal_factors(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A `[rank, in]` and B `[out, rank]`, whose product is the best approximation of `weight` of this rank.

    If the singular value decomposition of `weight` is U S V^T, A is sqrt(S) V^T and B is U sqrt(S), for the largest
    singular values (Meng et al., 2024). They are computed in at least float32, by randomized subspace iteration (Halko
    et al., 2011).
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    with torch.random.fork_rng([wide.device] if wide.is_cuda else []):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(wide, q=min(rank + _OVERSAMPLING, *wide.shape), niter=8)
    root = s[:rank].sqrt()
    return root.unsqueeze(1) * v[:, :rank].T, u[:, :rank] * root


@torch.no_grad()
def subtract_initial_product(model: nn.Module, section: AdapterSection) -> None:
    """With PiSSA, subtracts the product of the initial A and B from the base model's weights.

    Must be called once, after the weights of the base model and the initial A and B are loaded.
    """
    for linear in _adapted(model) if section.init == "pissa" else ():
        a, b = _full(linear.lora_a0), _full(linear.lora_b0)
        shard = local(linear.weight)
        rows, columns = shard_part(linear.weight).slices
        product = (b[rows] @ a[:, columns]).to(shard.device) * section.scale
        shard.copy_((shard.to(product.dtype) - product).to(shard.dtype))


def _adapted(model: nn.Module) -> Iterator[Any]:
    """Yields the linear layers with an adapter."""
    return (m for m in model.modules() if isinstance(m, nn.Linear) and isinstance(getattr(m, "lora", None), Lora))


def _full_weight(linear: Any) -> torch.Tensor:
    """Returns the full weight of a layer without its adapter, dequantized if it is quantized."""
    weight = _full(linear.weight)
    return dequantize_blocks(weight, _full(linear.weight_scale)) if has_quantized_weight(linear) else weight


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor. All ranks of the tensor's mesh must call this function."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
