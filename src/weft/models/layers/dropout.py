"""Dropout (Srivastava et al., 2014) whose masks do not depend on how a row's tokens are shared out."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# Of so many tokens of a row that are here: how many the whole row has, and the places of these.
FullSequence = Callable[[int], tuple[int, torch.Tensor]]


class Dropout(nn.Module):
    """In training, numbers are set to 0 with probability `p`, and the others are divided by 1 - p.

    Attributes:
        full_sequence: a seam for sharded sequences: the mask is drawn for the full sequence, then indexed.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.full_sequence: FullSequence | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, width]` -> `[batch, seq, width]`"""
        if self.p == 0 or not self.training:
            return x
        if self.full_sequence is None:
            return F.dropout(x, self.p)
        length, places = self.full_sequence(x.shape[1])
        return x * F.dropout(x.new_ones(x.shape[0], length, *x.shape[2:]), self.p)[:, places]
