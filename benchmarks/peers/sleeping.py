"""An objective whose matrix products take the time of a device with `RANKING_FLOPS` FLOP/s, however busy the cores are.

The product is computed, and the process sleeps for the rest of its time. So more ranks than cores do not slow each
other down, as long as the products of the small model take much less than their time.
"""

import os
import time

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

from weft.kernels.linear import product
from weft.objectives.pretrain import Pretrain


@register_flop_formula(product._opoverload.overloadpacket)
def product_flops(a, b, **others):
    """The FLOPs of `a @ b.mT`, from the shapes."""
    return 2 * a[0] * a[1] * b[0]


class Slow(TorchDispatchMode):
    """Makes every operation with a known number of FLOPs last FLOPs / rate."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate, self.owed = rate, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.owed += count(*args, **(kwargs or {}), out_val=out) / self.rate - (time.perf_counter() - began)
            if self.owed > 1e-3:  # shorter sleeps are not exact
                before = time.perf_counter()
                time.sleep(self.owed)
                self.owed -= time.perf_counter() - before
        return out


class Sleeping(Pretrain):
    """The objective `pretrain` on a slow device."""

    def __init__(self):
        super().__init__()
        Slow(float(os.environ["RANKING_FLOPS"])).__enter__()
