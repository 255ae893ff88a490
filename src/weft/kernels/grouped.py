"""One matrix product for each expert's rows, in a single call: what a mixture of experts spends its time on.

An operator of its own, so that compiled code holds one call and knows nothing of counts that change with every batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.kernels.autocast import as_autocast

_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes: what the fused kernel asks of every row
# oneDNN, which multiplies 16-bit matrices on CPUs, makes a program for each new shape, and experts' counts are new in
# every step: 8,192 rows of 256 for 16 experts of width 96 took 18.6 ms, with counts in multiples of 32 they take 1.1;
# the gradient of the weights 31.5 and 2.1 (2 threads).
_STEP = 32
_SIGNATURE = "(Tensor x, Tensor weight, Tensor ends) -> Tensor"
_BACKWARD = "(Tensor grad, Tensor x, Tensor weight, Tensor ends) -> (Tensor, Tensor)"


def grouped_linear_reference(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`grouped_linear` as a loop over the experts."""
    return torch.cat([rows @ matrix.mT for rows, matrix in zip(_split(x, ends), weight, strict=True)])


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each row times the matrix of its expert.

    Args:
        x: `[rows, in]`, the rows of the first expert first.
        weight: `[experts, out, in]`.
        ends: int32 `[experts]`, where each expert's rows end; the last one is `rows`. An expert may have none.

    Returns:
        `[rows, out]`
    """
    return _grouped_linear(*as_autocast(x, weight), ends)


@torch.library.custom_op("weft::grouped_linear", mutates_args=(), schema=_SIGNATURE)
def _grouped_linear(x, weight, ends):
    if _in_steps(x):
        return _stepped(x, weight.mT, ends)
    if _fused(x, weight):
        return F.grouped_mm(x.contiguous(), weight.mT, offs=ends)
    return grouped_linear_reference(x, weight, ends)


@torch.library.custom_op("weft::grouped_linear_backward", mutates_args=(), schema=_BACKWARD)
def grouped_linear_backward(grad, x, weight, ends):
    """The gradients of `x` and of `weight`."""
    grad = grad.contiguous()
    if _in_steps(x):
        return _stepped(grad, weight, ends), _stepped_weights(grad, x, weight, ends)
    if _fused(x, weight):
        of_weight = F.grouped_mm(grad.mT, x.contiguous(), offs=ends)
        return F.grouped_mm(grad, weight, offs=ends), of_weight
    parts = _split(grad, ends)
    of_x = torch.cat([rows @ matrix for rows, matrix in zip(parts, weight, strict=True)])
    of_weight = torch.stack([rows.mT @ inputs for rows, inputs in zip(parts, _split(x, ends), strict=True)])
    return of_x, of_weight


def _fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    return x.dtype in _FUSED_DTYPES and aligned and len(x) > 0


def _in_steps(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and len(x) > 0


def _size(count: int) -> int:
    """A count, up to the next of few: multiples of 32, of more than 256 four for each doubling."""
    step = max(_STEP, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def _stepped(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its matrix `[in, out]`, with a few rows of the next ones, whose own results follow."""
    rows, start = len(x), 0
    out = x.new_empty(rows, matrices.shape[2])
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        size = min(_size(end - start), rows)
        if start + size <= rows:
            torch.mm(x[start : start + size], matrix, out=out[start : start + size])
        else:  # none follow: take some that went before
            out[start:end] = (x[rows - size :] @ matrix)[start - (rows - size) : end - (rows - size)]
        start = end
    return out


def _stepped_weights(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights `[experts, out, in]`; rows of other experts are multiplied by zeros."""
    rows, start, out = len(x), 0, torch.empty_like(weight)
    for of_weight, end in zip(out, ends.tolist(), strict=True):
        size = min(_size(end - start), rows)
        first = min(start, rows - size)
        own = grad.new_zeros(size, grad.shape[1])
        own[start - first : end - first] = grad[start:end]
        torch.mm(own.mT, x[first : first + size], out=of_weight)
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


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return *grouped_linear_backward(grad, *ctx.saved_tensors), None


_grouped_linear.register_autograd(_backward, setup_context=_keep)
