"""A window that slides along the text (Beltagy et al., "Longformer", 2020; Jiang et al., "Mistral 7B", 2023)."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge


class Sliding:
    """Each token looks at the last tokens before it.

    Args:
        window: the most keys that a query sees, its own with them.
    """

    def __init__(self, *, window: Annotated[int, Ge(1)]):
        self.window = window

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether a query looks at a key."""
        return query - key < self.window
