"""Grouped matrix products: the products of all experts of a mixture, in a single call.

`grouped_linear` is a custom operator: compiled code sees one call and no token counts, which change with every batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.kernels.autocast import as_autocast

_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes, required of every row by the fused kernel
# oneDNN, which computes 16-bit matrix products on CPUs, compiles a kernel for each new shape, and the experts' token
# counts change in every step. Counts are therefore rounded up to multiples of 32. For 8,192 rows of 256 and 16 experts
# of width 96 (2 threads), the product then takes 1.1 ms instead of 18.6, and the weights' gradient 2.1 ms instead of
# 31.5.
_STEP = 32
_SIGNATURE = "(Tensor x, Tensor weight, Tensor ends) -> Tensor"
_BACKWARD = "(Tensor grad, Tensor x, Tensor weight, Tensor ends) -> (Tensor, Tensor)"


def grouped_linear_reference(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Computes `grouped_linear` as a loop over the experts."""
    return torch.cat([rows @ matrix.mT for rows, matrix in zip(_split(x, ends), weight, strict=True)])


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies each row by its expert's matrix.

    Args:
        x: `[rows, in]`, sorted by expert.
        weight: `[experts, out, in]`.
        ends: int32 `[experts]`, the index after each expert's last row; the last entry is the number of rows. An expert
            can have no rows.

    Returns:
        `[rows, out]`
    """
    return _grouped_linear(*as_autocast(x, weight), ends)


@torch.library.custom_op("weft::grouped_linear", mutates_args=(), schema=_SIGNATURE)
def _grouped_linear(x, weight, ends):
    if _pads_shapes(x):
        return _padded_products(x, weight.mT, ends)
    if _fused(x, weight):
        return F.grouped_mm(x.contiguous(), weight.mT, offs=ends)
    return grouped_linear_reference(x, weight, ends)


@torch.library.custom_op("weft::grouped_linear_backward", mutates_args=(), schema=_BACKWARD)
def grouped_linear_backward(grad, x, weight, ends):
    """Returns the gradients of `x` and `weight`."""
    grad = grad.contiguous()
    if _pads_shapes(x):
        return _padded_products(grad, weight, ends), _padded_weight_gradient(grad, x, weight, ends)
    if _fused(x, weight):
        return F.grouped_mm(grad, weight, offs=ends), F.grouped_mm(grad.mT, x.contiguous(), offs=ends)
    grads = _split(grad, ends)
    x_grad = torch.cat([rows @ matrix for rows, matrix in zip(grads, weight, strict=True)])
    weight_grad = torch.stack([rows.mT @ inputs for rows, inputs in zip(grads, _split(x, ends), strict=True)])
    return x_grad, weight_grad


def _fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    return x.dtype in _FUSED_DTYPES and aligned and len(x) > 0


def _pads_shapes(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and len(x) > 0


def _round_up(count: int) -> int:
    """Rounds a number of rows up to a multiple of 32; above 256, to a multiple of a quarter of a power of two.

    The power of two is the largest one below `count`. So there are four possible results per doubling of `count`.
    """
    step = max(_STEP, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def _padded_products(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies each row of `x` by its expert's matrix in `matrices` `[experts, in, out]`.

    The number of rows of each product is rounded up. A product therefore also writes rows of the next experts, whose
    own products then overwrite these rows.
    """
    rows, start = len(x), 0
    out = x.new_empty(rows, matrices.shape[2])
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        size = min(_round_up(end - start), rows)
        if start + size <= rows:
            torch.mm(x[start : start + size], matrix, out=out[start : start + size])
        else:  # too few rows follow, so earlier rows are included
            out[start:end] = (x[rows - size :] @ matrix)[start - (rows - size) : end - (rows - size)]
        start = end
    return out


def _padded_weight_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor):
    """Returns the gradient of the weights, `[experts, out, in]`.

    The number of rows of each product is rounded up; the output gradients of the additional rows are set to 0.
    """
    rows, start, out = len(x), 0, torch.empty_like(weight)
    for expert_out, end in zip(out, ends.tolist(), strict=True):
        size = min(_round_up(end - start), rows)
        first = min(start, rows - size)
        expert_grad = grad.new_zeros(size, grad.shape[1])
        expert_grad[start - first : end - first] = grad[start:end]
        torch.mm(expert_grad.mT, x[first : first + size], out=expert_out)
        start = end
    return out


def _split(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    stops = ends.tolist()
    return x.split([stop - start for start, stop in zip([0, *stops], stops, strict=False)])


@_grouped_linear.register_fake
def _(x, weight, ends):
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_linear_backward.register_fake
def _(grad, x, weight, ends):
    return torch.empty_like(x), torch.empty_like(weight)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    if not ctx.needs_input_grad[1]:  # frozen weights
        _, weight, ends = ctx.saved_tensors
        return _grouped_linear(grad.contiguous(), weight.mT, ends), None, None
    return *grouped_linear_backward(grad, *ctx.saved_tensors), None


_grouped_linear.register_autograd(_backward, setup_context=_setup_context)
