"""Fixed attention (Child et al., "Generating Long Sequences with Sparse Transformers", 2019)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Fixed:
    """Each token attends to its own block, and to the last tokens of every earlier block, which summarize it.

    All heads use the union of the paper's two sets of keys.

    Args:
        stride: block size in tokens.
        expressivity: number of tokens at each block's end that later blocks see; the paper's c.
    """

    def __init__(self, *, stride: Annotated[int, Ge(1)], expressivity: Annotated[int, Ge(1)] = 1):
        self.stride, self.expressivity = stride, expressivity

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same_block = query // self.stride == key // self.stride
        return same_block | (key % self.stride >= self.stride - self.expressivity)
