"""The Longformer pattern: a dilated window and global tokens (Beltagy et al., "Longformer", 2020)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Longformer:
    """Each token attends to a dilated window of earlier tokens and to the first tokens of its document.

    Args:
        window: window size in keys, counting the query itself.
        dilation: distance between neighboring keys of the window; 1 is a window without gaps.
        global_tokens: number of tokens at the document's start that all tokens attend to.
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
        distance = query - key
        near = (distance < self.window * self.dilation) & (distance % self.dilation == 0)
        return near | (key < self.global_tokens)
