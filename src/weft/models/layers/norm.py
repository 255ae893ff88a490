"""Norms of the residual stream, and of queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from weft.config.model import ModelSection
from weft.models.layers.custom import custom_component


class RMSNorm(nn.Module):
    """The RMS norm: x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, 2019).

    The norm is computed in at least float32. The result has the weight's dtype; the residual stream can have a wider
    dtype.
    """

    initial_weight = 1.0

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((size,), self.initial_weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes `[..., hidden]` along the last dimension."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        out = F.rms_norm(x.to(dtype), self.weight.shape, self.scale(dtype), self.eps)
        return out.to(self.weight.dtype)

    def scale(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the factor by which normalized elements are multiplied, cast to `dtype`."""
        return self.weight.to(dtype)


class RMSNorm1p(RMSNorm):
    """An RMS norm that multiplies by 1 + weight. Initial weights are 0, and weight decay pulls the scale to 1."""

    initial_weight = 0.0

    def scale(self, dtype: torch.dtype) -> torch.Tensor:
        return 1 + self.weight.to(dtype)


class LayerNorm(nn.Module):
    """The layer norm: (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016); dtypes as in `RMSNorm`."""

    initial_weight = 1.0

    def __init__(self, size: int, eps: float, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes `[..., hidden]` along the last dimension."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        out = F.layer_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), bias, self.eps)
        return out.to(self.weight.dtype)


NORMS = {"rmsnorm": RMSNorm, "rmsnorm1p": RMSNorm1p, "layernorm": LayerNorm}


def make_norm(config: ModelSection) -> nn.Module:
    """Creates a norm of the residual stream: a built-in norm or a custom component."""
    size = config.hidden_size, config.rms_norm_eps
    if config.norm in NORMS:
        options = {"bias": config.norm_bias} if config.norm == "layernorm" else {}
        return NORMS[config.norm](*size, **options)
    norm = custom_component(config.norm, "norm", *size)
    norm.register_forward_pre_hook(_cast_input)
    return norm


def _cast_input(norm: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Casts a norm's input to the weights' dtype, as PyTorch's norms require; the residual stream may be wider."""
    (x,) = inputs
    weight = next(norm.parameters(), None)
    return (x if weight is None else x.to(weight.dtype),)
