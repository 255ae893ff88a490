"""Strided attention (Child et al., "Generating Long Sequences with Sparse Transformers", 2019)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Strided:
    """Each token looks at the `stride` tokens before it, and at every `stride`-th one further back.

    The paper's two sets of keys, merged: all heads look at both.

    Args:
        stride: about the square root of the sequence's length makes the work least.
    """

    def __init__(self, *, stride: Annotated[int, Ge(1)]):
        self.stride = stride

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query looks at a key."""
        distance = query - key
        return (distance <= self.stride) | (distance % self.stride == 0)
