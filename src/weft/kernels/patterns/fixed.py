"""Fixed attention (Child et al., "Generating Long Sequences with Sparse Transformers", 2019)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Fixed:
    """Each token looks at its own block, and at the last tokens of every block before: these sum up for the rest.

    The paper's two sets of keys, merged: all heads look at both.

    Args:
        stride: tokens of a block.
        expressivity: how many tokens at a block's end are seen from later ones; the paper's c.
    """

    def __init__(self, *, stride: Annotated[int, Ge(1)], expressivity: Annotated[int, Ge(1)] = 1):
        self.stride, self.expressivity = stride, expressivity

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query looks at a key."""
        own = query // self.stride == key // self.stride
        return own | (key % self.stride >= self.stride - self.expressivity)
