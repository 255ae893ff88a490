"""The BigBird pattern: window, global and random blocks (Zaheer et al., "Big Bird", 2020)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge

_MASK = 0x7FFFFFFF  # keeps products within 63 bits


class BigBird:
    """Each block of tokens attends to a window of blocks, to the document's first blocks and to random blocks.

    Random blocks depend on the seed and the query's block, not on the sequence length. The blocks between the first
    blocks and the window are divided into `random_blocks` intervals. One block is drawn from each interval, so the
    random blocks of a query differ from each other.

    Args:
        block_size: number of tokens per block.
        window: window size in blocks, counting the query's block.
        global_blocks: number of blocks at the document's start that all blocks attend to.
        random_blocks: number of random earlier blocks; at the start of a document there are fewer.
        seed: seed of the random blocks.
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
        query, key = query.to(torch.int64) // self.block_size, key.to(torch.int64) // self.block_size
        seen = (query - key < self.window) | (key < self.global_blocks)
        between = (query - self.window + 1 - self.global_blocks).clamp(min=0)  # number of candidate blocks
        for number in range(self.random_blocks):
            first = number * between // self.random_blocks
            length = (number + 1) * between // self.random_blocks - first
            drawn = self.global_blocks + first + self.random_number(query, number) % length.clamp(min=1)
            seen = seen | ((key == drawn) & (length > 0))
        return seen

    def random_number(self, block: torch.Tensor, draw: int) -> torch.Tensor:
        """Returns a pseudo-random integer of 31 bits for each block: a hash of the seed, the block and `draw`.

        Args:
            block: int64, indices of blocks.
            draw: index of the random block that is drawn, from 0.
        """
        start = (self.seed * 0x2545F491 + draw * 0x5851F42D) & _MASK
        mixed = (block * 0x41C64E6D + start) & _MASK
        for factor in (0x2C1B3C6D, 0x297A2D39):
            mixed = ((mixed ^ (mixed >> 15)) * factor) & _MASK
        return mixed ^ (mixed >> 15)
