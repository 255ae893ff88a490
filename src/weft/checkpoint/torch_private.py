"""The private name of torch that copies of tensors need. `weft.torch_private` has the others."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

# `weft.torch_private.NAMES` gives each of its own a reason.
NAMES = {"torch:Tensor._version": "finds a tensor that was written to while it was copied"}


def versions(tensor: torch.Tensor) -> list[int]:
    """Returns numbers that grow with operations that write to a tensor, also through a view, or to its local shard.

    They do not grow with writes to `tensor.data`, and to `detach()` of a DTensor.
    """
    if not isinstance(tensor, DTensor):
        return [tensor._version]
    with torch.no_grad():  # otherwise, `to_local` returns a copy of the shard's metadata
        return [tensor._version, tensor.to_local()._version]
