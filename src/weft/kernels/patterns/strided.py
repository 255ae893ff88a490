"""The strided pattern (Child et al., "Generating Long Sequences with Sparse Transformers", 2019)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Strided:
    """Each token attends to itself, to the `stride` tokens before it, and to earlier tokens at multiples of `stride`.

    The distances of the earlier tokens from the query are `2 * stride`, `3 * stride` and so on.

    Every head attends to both sets of keys (the merged head of Child et al., 2019).

    Args:
        stride: number of tokens in the window, without the query itself; also the distance between the attended tokens
            before the window. A query attends to the fewest tokens if `stride` is about the square root of the sequence
            length.
    """

    def __init__(self, *, stride: Annotated[int, Ge(1)]):
        self.stride = stride

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = query - key
        return (distance <= self.stride) | (distance % self.stride == 0)
