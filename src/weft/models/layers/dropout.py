"""Dropout (Srivastava et al., 2014) whose masks do not depend on how a sequence is sharded."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# Number of local tokens -> (length of the full sequence, positions of the local tokens in the full sequence).
FullSequence = Callable[[int], tuple[int, torch.Tensor]]


class Dropout(nn.Module):
    """Dropout: in training, sets elements to 0 with probability `p` and divides the other elements by 1 - p.

    Attributes:
        full_sequence: function that returns the length of the full sequence and the positions of this rank's tokens in
            it. `parallel/` sets it if sequences are sharded. The mask is then drawn for the full sequence, and indexed
            with these positions.
        full_features: size of the last dimension of the full input, and this rank's slice of it. `parallel/` sets it if
            this dimension is sharded; the mask is then drawn for the full dimension.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.full_sequence: FullSequence | None = None
        self.full_features: tuple[int, slice] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies dropout to `[batch, seq, hidden]`."""
        if self.p == 0 or not self.training:
            return x
        if self.full_sequence is None and self.full_features is None:
            return F.dropout(x, self.p)
        length, positions = (x.shape[1], slice(None)) if self.full_sequence is None else self.full_sequence(x.shape[1])
        width, features = (x.shape[-1], slice(None)) if self.full_features is None else self.full_features
        mask = F.dropout(x.new_ones(x.shape[0], length, *x.shape[2:-1], width), self.p)
        return x * mask[:, positions][..., features]
