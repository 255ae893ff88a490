"""Rotary position embedding (Su et al., 2021), in the half-split layout of Llama's published weights."""

from __future__ import annotations

import torch


def rope_table(
    positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotations of all positions, computed once a forward and handed to every block.

    Args:
        positions: `[batch, seq]`, or `[1, seq]` where all rows count alike.
        dtype: of the model's computing; the table has at least float32.

    Returns:
        cosines and sines, each `[batch, 1, seq, head_dim / 2]`.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    frequencies = 1.0 / theta**exponents
    angles = positions.to(dtype).unsqueeze(-1) * frequencies  # [batch, seq, head_dim / 2]
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate each pair (i, i + head_dim / 2) of `x` `[batch, heads, seq, head_dim]` by its position's angle."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
