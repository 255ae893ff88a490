"""Normalization of the residual stream and of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.model import ModelSection
from weft.models.layers.custom import own_part


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, 2019).

    Computed in at least float32 and returned in the weight's dtype: the residual stream may be wider than the matrices.
    """

    initial_weight = 1.0

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((width,), self.initial_weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]` -> `[..., width]`"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        out = F.rms_norm(x.to(dtype), self.weight.shape, self.scale(dtype), self.eps)
        return out.to(self.weight.dtype)

    def scale(self, dtype: torch.dtype) -> torch.Tensor:
        """What the normalized numbers are multiplied by."""
        return self.weight.to(dtype)


class RMSNorm1p(RMSNorm):
    """`RMSNorm` times 1 + weight: weight decay then draws towards 1, and initial weights are 0."""

    initial_weight = 0.0

    def scale(self, dtype: torch.dtype) -> torch.Tensor:
        """What the normalized numbers are multiplied by."""
        return 1 + self.weight.to(dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016), in dtypes as `RMSNorm`."""

    initial_weight = 1.0

    def __init__(self, width: int, eps: float, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]` -> `[..., width]`"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        out = F.layer_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), bias, self.eps)
        return out.to(self.weight.dtype)


NORMS = {"rmsnorm": RMSNorm, "rmsnorm1p": RMSNorm1p, "layernorm": LayerNorm}


def make_norm(config: ModelSection) -> nn.Module:
    """One norm of the residual stream."""
    size = config.hidden_size, config.rms_norm_eps
    if config.norm in NORMS:
        options = {"bias": config.norm_bias} if config.norm == "layernorm" else {}
        return NORMS[config.norm](*size, **options)
    norm = own_part(config.norm, "norm", *size)
    norm.register_forward_pre_hook(_to_the_weights_dtype)
    return norm


def _to_the_weights_dtype(norm: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """The residual stream may be wider than a norm's weights, and PyTorch's own norms want one dtype."""
    (x,) = inputs
    weight = next(norm.parameters(), None)
    return (x if weight is None else x.to(weight.dtype),)
