"""Measures free memory, and refuses models that do not fit."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.errors import UserError
from weft.formatting import byte_size
from weft.processes import available_memory


def free_memory(device: str | torch.device) -> int:
    """Returns the number of bytes that this process can still allocate on a device."""
    device = torch.device(device)
    if device.type != "cuda":
        return available_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def check_memory(needed: int, device: str | torch.device, path: Path) -> None:
    """Raises UserError if a model's weights do not fit in the free memory of a device.

    Args:
        needed: bytes of the weights.
        path: the checkpoint, for the message.
    """
    if torch.device(device).type in ("cpu", "cuda") and needed > (free := free_memory(device)):
        raise UserError(
            f"the weights need {byte_size(needed)}, but {device} has {byte_size(free)} of free memory; load them in "
            "a smaller dtype, quantize them, or distribute the layers over devices by a device map",
            path,
        )
