"""A dilated window and global tokens (Beltagy et al., "Longformer: The Long-Document Transformer", 2020)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Longformer:
    """Each token looks at a window before it and at the first tokens of its document; causal, as the paper's decoder.

    Args:
        window: how many keys of the window a query sees at the most, its own with them.
        dilation: the window takes every so-manieth key, and so reaches that much further.
        global_tokens: all tokens look at so many of their document's first ones.
    """

    def __init__(
        self,
        *,
        window: Annotated[int, Ge(1)],
        dilation: Annotated[int, Ge(1)] = 1,
        global_tokens: Annotated[int, Ge(0)] = 1,
    ):
        self.window, self.dilation, self.global_tokens = window, dilation, global_tokens

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query looks at a key."""
        distance = query - key
        near = (distance < self.window * self.dilation) & (distance % self.dilation == 0)
        return near | (key < self.global_tokens)
