"""A rank's part of a tensor that may be shared out."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing its memory, and without a gradient's history."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():  # detaching a DTensor takes eight times as long
        return tensor.to_local()
