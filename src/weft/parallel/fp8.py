"""Matrix products in 8 bits (Micikevicius et al., 2022), by torchao, of the blocks' linear layers.

Weights are stored, gathered and saved as usual. In a product, this rank's shards of both factors are scaled by their
largest element and rounded: to e4m3 in forward, and gradients to e5m2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import nn

from weft.errors import UserError

MULTIPLE = 16  # products in 8 bits need sizes that are multiples of it
_ROUTERS = ("router", "gate")  # rounding must not change the choice of experts


def raise_unless_usable(device: torch.device) -> None:
    """Raises UserError, with the reason, if products in 8 bits cannot be computed."""
    problem = None
    if device.type != "cuda":
        problem = f"the device is a {device.type}, which has no products in 8 bits"
    elif torch.cuda.get_device_capability(device) < (8, 9):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        problem = f"{torch.cuda.get_device_name(device)} has compute capability {found}; 8.9 is required"
    if problem is not None:
        raise UserError(f"training.fp8: {problem}; remove the key")
    raise_unless_installed()


def raise_unless_installed() -> None:
    """Raises UserError without torchao."""
    if find_spec("torchao") is None:
        raise UserError("training.fp8: torchao is not installed; pip install 'weft-train[fp8]', or remove the key")


def use_fp8(model: nn.Module, blocks: Iterable[nn.Module], *, ranks: int = 1, emulate: bool = False) -> None:
    """Has the blocks' linear layers multiply in 8 bits, in place; parameters and their names do not change.

    Routers, and layers whose sizes are not multiples of 16, are left as they are.

    Args:
        model: on any device, not sharded.
        ranks: of `tp`, which may shard a matrix.
        emulate: round in the same way, and multiply in more bits, on any device.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao warns of optional libraries that it cannot load
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

    # Gradients of weights sum over tokens: their number is padded with zeros.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=fits, config=config)
