"""Blocks of a window, global and random ones (Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge

_MASK = 0x7FFFFFFF  # products of two such numbers and small factors stay within 63 bits


class BigBird:
    """Each block of tokens looks at itself and the blocks before it, at the first blocks, and at a few random ones.

    Which blocks are random depends on the seed and on the block that looks, not on the length of the sequence. Each is
    drawn from a stretch of its own of those between the first ones and the window, so that no two are the same.

    Args:
        block_size: tokens of a block.
        window: blocks of the window, the query's own with them.
        global_blocks: all blocks look at so many of their document's first ones.
        random_blocks: and at so many earlier ones, or as many as there are.
        seed: of the random blocks.
    """

    def __init__(
        self,
        *,
        block_size: Annotated[int, Ge(1)] = 64,
        window: Annotated[int, Ge(1)] = 3,
        global_blocks: Annotated[int, Ge(0)] = 1,
        random_blocks: Annotated[int, Ge(0)] = 3,
        seed: Annotated[int, Ge(0)] = 0,
    ):
        self.block_size, self.window = block_size, window
        self.global_blocks, self.random_blocks, self.seed = global_blocks, random_blocks, seed

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query looks at a key."""
        query, key = query.to(torch.int64) // self.block_size, key.to(torch.int64) // self.block_size
        seen = (query - key < self.window) | (key < self.global_blocks)
        between = (query - self.window + 1 - self.global_blocks).clamp(min=0)  # blocks that may be drawn
        for number in range(self.random_blocks):
            first = number * between // self.random_blocks
            stretch = (number + 1) * between // self.random_blocks - first
            drawn = self.global_blocks + first + self.number(query, number) % stretch.clamp(min=1)
            seen = seen | ((key == drawn) & (stretch > 0))
        return seen

    def number(self, block: torch.Tensor, place: int) -> torch.Tensor:
        """A pseudo-random number of 31 bits for each block's `place`-th draw: multiplied, shifted and folded."""
        start = (self.seed * 0x2545F491 + place * 0x5851F42D) & _MASK
        mixed = (block * 0x41C64E6D + start) & _MASK
        for factor in (0x2C1B3C6D, 0x297A2D39):
            mixed = ((mixed ^ (mixed >> 15)) * factor) & _MASK
        return mixed ^ (mixed >> 15)
