"""Matrix products in 8 bits (Micikevicius et al., 2022), by torchao: the layers' linear maps, and nothing else.

Weights are kept, gathered and saved as ever. In a product the rank's own parts of both factors are scaled by their
largest number and rounded: to e4m3 in forward, gradients to e5m2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import nn

from weft.errors import UserError

MULTIPLE = 16  # of which the sizes of a product in 8 bits must be multiples
_ROUTERS = ("router", "gate")  # which experts a token goes to must not hang on the rounding


def raise_unless_usable(device: torch.device) -> None:
    """Raise UserError, saying what is missing, where products in 8 bits cannot be made."""
    lacks = None
    if device.type != "cuda":
        lacks = f"the device is a {device.type}, and takes no products in 8 bits"
    elif torch.cuda.get_device_capability(device) < (8, 9):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        lacks = f"{torch.cuda.get_device_name(device)} has compute capability {found}, and 8.9 is the first to know it"
    if lacks is not None:
        raise UserError(f"training.fp8: {lacks}; remove the key")
    if find_spec("torchao") is None:
        raise UserError("training.fp8: torchao is not installed; pip install 'weft-train[fp8]', or remove the key")


def use_fp8(model: nn.Module, blocks: Iterable[nn.Module], *, ranks: int = 1, emulate: bool = False) -> None:
    """Have the blocks' linear maps multiply in 8 bits, in place; parameters and their names stay.

    Maps whose sizes do not allow it stay what they are, as do routers.

    Args:
        model: on any device, not sharded.
        ranks: that a matrix may be cut over (`tp`).
        emulate: round in the same way and multiply in more bits, which any device can.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao tells of libraries that it cannot load and are not asked for
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    logging.disable(before)
    inner = {module for block in blocks for module in block.modules() if module is not block}

    def fits(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module not in inner or name.rpartition(".")[2] in _ROUTERS:
            return False
        return all(size % (MULTIPLE * ranks) == 0 for size in (module.in_features, module.out_features))

    # Gradients of weights sum over tokens, of which there may be any number: filled up with zeros.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=fits, config=config)
