"""The sliding window pattern (Beltagy et al., "Longformer", 2020; Jiang et al., "Mistral 7B", 2023)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Sliding:
    """Each token attends to the last `window` tokens.

    Args:
        window: window size in tokens, counting the query itself.
    """

    def __init__(self, *, window: Annotated[int, Ge(1)]):
        self.window = window

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query - key < self.window
