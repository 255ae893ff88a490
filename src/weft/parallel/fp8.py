"""Makes the blocks' linear layers compute matrix products in 8 bits (Micikevicius et al., 2022), with torchao.

Weights are stored, gathered and saved in the same dtypes as without fp8. Before a product, each factor (with `tp`, this
rank's shard of the factor) is scaled by its largest absolute value and rounded: activations and weights to e4m3,
gradients to e5m2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weft.errors import UserError
from weft.parallel.torchao import quiet_import, raise_unless_installed

MULTIPLE = 16  # products in 8 bits need sizes that are multiples of 16
_ROUTERS = ("router", "gate")  # rounding must not change the choice of experts


def raise_unless_usable(device: torch.device) -> None:
    """Raises UserError if `device` cannot compute FP8 matrix products, or torchao is not installed."""
    problem = None
    if device.type != "cuda":
        problem = f"this run is on a {device.type.upper()}, but FP8 matrix products need an NVIDIA GPU"
    elif torch.cuda.get_device_capability(device) < (8, 9):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        problem = f"{torch.cuda.get_device_name(device)} has compute capability {found}; 8.9 is required"
    if problem is not None:
        raise UserError(f"training.fp8: {problem}; remove the key")
    raise_unless_installed("training.fp8", "fp8")


def use_fp8(model: nn.Module, blocks: Iterable[nn.Module], *, ranks: int = 1, emulate: bool = False) -> None:
    """Makes the blocks' linear layers multiply in 8 bits, in place. Parameters and their names do not change.

    Routers, and layers whose sizes per rank are not multiples of 16, do not change.

    Args:
        model: unsharded model, on any device.
        ranks: number of `tp` ranks, over which matrices will be sharded.
        emulate: whether to round to 8 bits but multiply in higher precision, which works on any device.
    """
    with quiet_import():
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    inner = {module for block in blocks for module in block.modules() if module is not block}

    def fits(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module not in inner or name.rpartition(".")[2] in _ROUTERS:
            return False
        return all(size % (MULTIPLE * ranks) == 0 for size in (module.in_features, module.out_features))

    # Gradients of weights sum over tokens: zeros pad the number of tokens to a multiple of 16.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=fits, config=config)
