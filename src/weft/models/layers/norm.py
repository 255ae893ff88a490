"""Normalization of the residual stream and of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, 2019).

    Computed in at least float32 and returned in the weight's dtype: the residual stream may be wider than the matrices.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]` -> `[..., width]`"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        out = F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return out.to(self.weight.dtype)


class RMSNorm1p(RMSNorm):
    """`RMSNorm` times 1 + weight: weight decay then draws towards 1, and initial weights are 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]` -> `[..., width]`"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        out = F.rms_norm(x.to(dtype), self.weight.shape, 1 + self.weight.to(dtype), self.eps)
        return out.to(self.weight.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016), in dtypes as `RMSNorm`."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]` -> `[..., width]`"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        out = F.layer_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.bias.to(dtype), self.eps)
        return out.to(self.weight.dtype)


NORMS = {"rmsnorm": RMSNorm, "rmsnorm1p": RMSNorm1p, "layernorm": LayerNorm}
