"""Defines `LowRank`, the change of a weight by a low-rank adapter."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LowRank(NamedTuple):
    """The change of a weight `[out, in]` by LoRA (Hu et al., 2021): the weight plus `scale * b @ a`.

    With `magnitude` (DoRA; Liu et al., 2024), each row of this sum is then scaled to the norm in `magnitude`.

    >>> model = weft.load_model("runs/run")
    >>> engine, (out, size) = weft.Engine(model), model.layers[0].mlp.up_proj.weight.shape
    >>> a, b = torch.randn(4, size), torch.zeros(out, 4)
    >>> engine.add_adapter("tuned", {"layers.0.mlp.up_proj": weft.LowRank(a, b, scale=2.0)})
    >>> len(list(engine.submit([5, 6, 7], weft.Sampling(max_new_tokens=3), adapter="tuned")))
    3

    Attributes:
        a: `[rank, in]`; for the stacked weights `[experts, out, in]` of experts, `[experts, rank, in]`.
        b: `[out, rank]`, or `[experts, out, rank]`.
        scale: factor of the product.
        magnitude: `[out]`, the norm of each row of the changed weight; None: without DoRA.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0
    magnitude: torch.Tensor | None = None

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the changed weight, computed in at least float32, on the device of `weight`."""
        changed, gain = self._sum(weight)
        return changed if gain is None else changed * gain.unsqueeze(-1)

    def gain(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Returns the factor `[out]` by which DoRA scales each row of the sum; None without DoRA."""
        return None if self.magnitude is None else self._sum(weight)[1]

    def _sum(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        a, b = (one.detach().to(weight.device, dtype) for one in (self.a, self.b))
        changed = weight.detach().to(dtype) + self.scale * (b @ a)
        if self.magnitude is None:
            return changed, None
        magnitude = self.magnitude.detach().to(weight.device, dtype)
        return changed, dora_gain(magnitude, torch.linalg.vector_norm(changed, dim=-1))


def dora_gain(magnitude: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Returns the factor `[out]` by which DoRA scales rows of this norm: magnitude / norm, and 1 for rows of zeros."""
    zero = norm == 0
    return torch.where(zero, 1, magnitude / torch.where(zero, 1, norm))  # without inf, whose gradient is NaN
