"""Times of a rank's work on a device: a roofline with the efficiencies of the hardware file.

A matrix product takes the longer of its arithmetic and its memory traffic. Element-wise operations take their bytes
over the memory's bandwidth. The host starts operations one by one, and a device with small operations waits for it. A
CPU is its own host, so that the times to start operations are added.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import UserError
from weft.planner.hardware import Hardware
from weft.planner.work import WIDTHS, AttentionWork, Matmul, Work

BACKWARD_ATTENTION = 2.5  # five products in backward, two in forward (Dao et al., 2022)
BACKWARD_EFFICIENCY = 0.8  # of fused attention's rate in forward
HEAD_MULTIPLE = 32  # kernels of fused attention compute heads of a multiple of this size
BACKWARD_OPERATIONS = 2.0  # operations started in backward, by the autograd engine, for each of forward


@dataclass(frozen=True)
class Passes:
    """Seconds of the passes of a piece of work on one rank.

    Attributes:
        forward: the forward pass.
        backward_input: the part of backward that the preceding work waits for.
        backward_weight: the gradients of the weights.
        recompute: the part of the forward pass that backward repeats.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    recompute: float = 0.0

    @property
    def backward(self) -> float:
        """Seconds of backward without recomputation."""
        return self.backward_input + self.backward_weight


class Costs:
    """The times of one device in one dtype.

    Args:
        hardware: the hardware file.
        dtype: the compute dtype, such as `bfloat16`.
        fp8: whether the layers' products are computed in 8 bits.

    Raises:
        UserError: the device does not support the dtype.
    """

    def __init__(self, hardware: Hardware, dtype: str, *, fp8: bool = False):
        self.device, self.dtype, self.measured = hardware.device, dtype, hardware.measured_operators
        peaks, fractions = self.device.peak_tflops.given(), self.device.matmul_efficiency.given()
        for name in (dtype, *(["float8"] if fp8 else [])):
            if name not in peaks:
                listed = ", ".join(peaks)
                raise UserError(
                    f"hardware: {self.device.name} has no peak in {name} (it has {listed}); change the dtype"
                )
        self.peak = peaks[dtype] * 1e12
        self.rates = {name: peak * 1e12 * fractions.get(name, min(fractions.values())) for name, peak in peaks.items()}
        self.layers = "float8" if fp8 else dtype
        self.bandwidth = self.device.memory_bandwidth_gb_s * 1e9 * self.device.memory_efficiency
        self.half, self.launch = self.device.matmul_half_size, self.device.launch_us * 1e-6

    def matmul(self, product: Matmul, dtype: str | None = None) -> float:
        """Returns the seconds of `product.count` matrix products."""
        dtype = dtype or self.layers
        known = self.measured.get(("matmul", (product.m, product.k, product.n), dtype))
        if known is not None:
            return known * product.count
        size = (float(product.m) * product.k * product.n) ** (1 / 3)
        seconds = 2 * size**3 / (self.rates[dtype] * size / (size + self.half))
        moved = product.m * product.k + product.k * product.n + product.m * product.n
        return product.count * max(seconds, moved * WIDTHS[dtype] / self.bandwidth)

    def attention(self, work: AttentionWork | None) -> float:
        """Returns the seconds of the forward pass of fused attention."""
        if work is None:
            return 0.0
        known = self.measured.get(("attention", work.shape, self.dtype))
        if known is not None:
            return known
        padded = -(-work.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE
        return work.flops * padded / work.head_dim / (self.peak * self.device.attention_efficiency)

    def moved(self, count: float) -> float:
        """Returns the seconds of element-wise operations that read and write `count` bytes."""
        return count / self.bandwidth

    def passes(self, work: Work, *, trained: bool = True, repeated: float = 0.0, head: bool = False) -> Passes:
        """Returns the seconds of the passes of a piece of work.

        Args:
            trained: whether the parameters have gradients.
            repeated: fraction of the forward pass that backward repeats, from `recomputed`.
            head: whether the work is the output head, which is not computed in 8 bits.
        """
        products = sum(self.matmul(one, self.dtype if head else None) for one in work.matmuls)
        attention, moved = self.attention(work.attention), self.moved(work.bytes_forward)
        started = work.operations * self.launch
        forward = products + attention + moved
        forward = forward + started if self.device.kind == "cpu" else max(forward, started)
        inputs = products + attention * BACKWARD_ATTENTION / BACKWARD_EFFICIENCY + self.moved(work.bytes_backward)
        weights = products if trained else 0.0
        started *= BACKWARD_OPERATIONS
        if self.device.kind == "cpu":
            inputs += started
        elif inputs + weights < started:
            inputs = started - weights
        return Passes(forward, inputs, weights, forward * repeated)

    def recomputed(self, work: Work, checkpointing: str) -> float:
        """Returns the fraction of a block's forward pass that backward repeats.

        Args:
            checkpointing: a value of `training.activation_checkpointing`.
        """
        if checkpointing == "none":
            return 0.0
        if checkpointing.startswith("every-"):
            return 1 / int(checkpointing.removeprefix("every-"))
        moved = self.moved(work.bytes_forward)
        cheap = moved / (moved + sum(map(self.matmul, work.matmuls)) + self.attention(work.attention) or 1.0)
        if checkpointing == "selective":
            return cheap
        if checkpointing.startswith("budget-"):
            # Element-wise results, about two thirds of the bytes, are dropped first; then those of products.
            dropped = 1 - float(checkpointing.removeprefix("budget-"))
            return cheap * min(1.0, dropped * 1.5) + (1 - cheap) * max(0.0, dropped * 3 - 2)
        return 1.0
