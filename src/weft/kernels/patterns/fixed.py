"""The fixed pattern (Child et al., "Generating Long Sequences with Sparse Transformers", 2019)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Fixed:
    """Each token attends to its own block, and to the last tokens of every earlier block.

    The last tokens of a block summarize the block. Every head attends to both sets of keys (the merged head of Child et
    al., 2019).

    Args:
        stride: block size in tokens.
        expressivity: number of tokens at the end of each block that later blocks see; c in Child et al. (2019).
    """

    def __init__(self, *, stride: Annotated[int, Ge(1)], expressivity: Annotated[int, Ge(1)] = 1):
        self.stride, self.expressivity = stride, expressivity

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same_block = query // self.stride == key // self.stride
        return same_block | (key % self.stride >= self.stride - self.expressivity)
