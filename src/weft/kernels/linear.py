"""Matrix products in float32 on CPUs on which oneDNN is faster than MKL.

PyTorch computes float32 products on CPUs with MKL, which has AVX-512 kernels for Intel's processors only. oneDNN has
them for all: 230 GFLOP/s on a core of an AMD EPYC (Zen 5), instead of 105.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.kernels.processor import features, vendor
from weft.torch_private import multiply_onednn

# Multiplications of the smallest product for oneDNN. Smaller ones take less time than the call of a custom operator on
# Zen 5 (avx_vnni), which multiplies 512 bits at a time. Zen 4 multiplies 256: there, oneDNN gains 8% in large products.
LEAST_WORK = 1 << 22 if "avx_vnni" in features() else 1 << 27
# The same for products of two transposed matrices (gradients of weights), which oneDNN copies first. On Zen 4, it takes
# up to 1.3 times as long as MKL in the blocks of a model, and 0.9 times in the head.
LEAST_TRANSPOSED_WORK = LEAST_WORK if "avx_vnni" in features() else 1 << 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes `F.linear`, with oneDNN if it is faster, and all tensors are plain, in float32, on a CPU, and large.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.

    Returns:
        `[..., out]`
    """
    if not _fits(x, weight):
        return F.linear(x, weight, bias)
    out = product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes `a @ b` for two matrices as `torch.mm` does, with oneDNN if it is faster. Not differentiable."""
    if not _fits(a, b.mT):
        return torch.mm(a, b, out=out)
    found = _product(a, b)
    return found if out is None else out.copy_(found)


def onednn_is_faster() -> bool:
    """Whether this process computes float32 products on CPUs faster with oneDNN than with MKL.

    The processor decides, not a measurement: a resumed run must compute the same bits.
    """
    if multiply_onednn is None or not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available():
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and vendor() == "AuthenticAMD"


ONEDNN = onednn_is_faster()  # read once: compiled code does not call the function


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if not ONEDNN:
        return False
    plain = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in (x, weight))
    plain = plain and type(x) is torch.Tensor and not torch.is_autocast_enabled("cpu")
    return plain and x.numel() * weight.shape[0] >= LEAST_WORK


@torch.library.custom_op("weft::product", mutates_args=(), device_types="cpu", schema="(Tensor a, Tensor b) -> Tensor")
def product(a, b):
    """Computes `a @ b.mT` for two float32 matrices with oneDNN."""
    if not (b.is_contiguous() or b.mT.is_contiguous()):
        b = b.contiguous()  # with gaps between rows (a slice of columns), oneDNN takes 1,000 times as long
    return multiply_onednn(a, b, None, "none", [], "")


@product.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[0])


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes `a @ b`. For two transposed matrices, oneDNN is faster if the result has fewer rows."""
    if a.stride(1) == 1:
        return product(a, b.mT)
    if a.numel() * b.shape[1] < LEAST_TRANSPOSED_WORK:
        return torch.mm(a, b)
    return product(b.mT, a).mT if len(a) > b.shape[1] else product(a, b.mT)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@torch.autocast("cpu", enabled=False)  # which the caller of backward can have enabled
def _backward(ctx, grad):
    a, b = ctx.saved_tensors
    needed = ctx.needs_input_grad
    return _product(grad, b) if needed[0] else None, _product(grad.mT, a) if needed[1] else None


product.register_autograd(_backward, setup_context=_setup_context)
