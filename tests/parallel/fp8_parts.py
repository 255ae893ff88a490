"""What ranks do in the tests of products in 8 bits."""

from functools import partial
from pathlib import Path

from pool import fit

from weft.parallel import fp8
from weft.train import trainer


def fit_emulating(file: Path, fresh: bool) -> None:
    """Train with products that are rounded as in 8 bits, on a device that knows none."""
    real, examine = fp8.use_fp8, trainer.raise_unless_usable
    fp8.use_fp8, trainer.raise_unless_usable = partial(real, emulate=True), lambda device: None
    try:
        fit(file, fresh)
    finally:
        fp8.use_fp8, trainer.raise_unless_usable = real, examine
