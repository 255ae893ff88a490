"""What ranks do in the tests of products in 8 bits."""

from functools import partial
from pathlib import Path

from pool import fit
from wire import Wire

from weft.parallel import fp8
from weft.train import trainer


def fit_emulating(file: Path, fresh: bool) -> dict[str, int]:
    """Train with products that are rounded as in 8 bits, on a device that knows none.

    Returns:
        Process group -> bytes of its all-gathers.
    """
    real, examine = fp8.use_fp8, trainer.raise_unless_usable
    fp8.use_fp8, trainer.raise_unless_usable = partial(real, emulate=True), lambda device: None
    try:
        with Wire() as wire:
            fit(file, fresh)
        return {axis: size for (kind, axis), (_, size) in wire.totals("kind", "axis").items() if kind == "all_gather"}
    finally:
        fp8.use_fp8, trainer.raise_unless_usable = real, examine
