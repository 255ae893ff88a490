"""Autocast for Weft's custom operators, which PyTorch's autocast does not cover."""

from __future__ import annotations

import torch


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts tensors to the autocast dtype if autocast is enabled on their device; float64 tensors are unchanged."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
