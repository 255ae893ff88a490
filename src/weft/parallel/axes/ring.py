"""Ring attention (Liu et al., 2023): keys and values circulate, so a rank stores one shard of them at a time.

Each rank's shard is two chunks of the sequence: a front chunk, and the mirrored back chunk from the end of the sequence
(`SequenceShard.positions`). At each step of the ring, a rank computes attention of its own queries to one rank's keys:

- its own keys: causal attention within the shard
- the keys of a lower rank: all queries attend to the lower rank's front chunk, and none to its back chunk
- the keys of a higher rank: only the queries of the back chunk attend, to both chunks of the higher rank

So at each step all ranks have the same amount of work. The partial outputs of the steps are computed by PyTorch's fused
kernel, and combined by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from weft.kernels.flash import DTYPES
from weft.torch_private import flash_cpu, flash_cpu_backward, flash_cuda, flash_cuda_backward

FLASH_HEAD_DIM = 256  # largest head size of PyTorch's CUDA kernel, which also needs a multiple of 8


def ring_usable(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether PyTorch's flash kernel, whose log-sum-exp ring attention needs, supports a dtype and a head size."""
    return device.type != "cuda" or (dtype in DTYPES and head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM)


@torch.compiler.disable
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """Computes causal attention over sequences that are sharded over `group`.

    Args:
        q: queries `[batch, heads, seq / ranks, head_dim]`, with the rank's two chunks concatenated.
        k, v: keys and values `[batch, kv_heads, seq / ranks, head_dim]`; `kv_heads` must divide `heads`.
        scale: multiplier of the attention logits; None means `1 / sqrt(head_dim)`.
        group: process group of `cp`.

    Returns:
        This rank's outputs, `[batch, heads, seq / ranks, head_dim]`.
    """
    return _RingAttention.apply(q, k, v, scale, group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, group):
        out, lse = torch.Tensor(), torch.Tensor()  # set at the first step
        for step, (queries, keys, causal, (ring_k, ring_v)) in enumerate(_ring(torch.stack((k, v)), group)):
            part, part_lse, *_ = _forward(q[:, :, queries], ring_k[:, :, keys], ring_v[:, :, keys], causal, scale)
            part, part_lse = part.to(part_lse.dtype), part_lse.unsqueeze(-1)
            if step == 0:
                # Copies, if casting made none: activation checkpointing may have saved the kernel's results.
                out, lse = part.clone() if part.dtype == q.dtype else part, part_lse.clone()
                continue
            before = lse[:, :, queries]
            total = torch.logaddexp(before, part_lse)
            out[:, :, queries] = out[:, :, queries] * (before - total).exp() + part * (part_lse - total).exp()
            lse[:, :, queries] = total
        out, lse = out.to(q.dtype), lse.squeeze(-1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        group = ctx.group
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        kv = torch.stack((k, v))
        grad_kv = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)  # circulates with its keys and values
        receive = None
        for queries, keys, causal, (ring_k, ring_v) in _ring(kv, group):
            inputs = (grad[:, :, queries], q[:, :, queries], ring_k[:, :, keys], ring_v[:, :, keys])
            parts = _backward(*inputs, out[:, :, queries], lse[:, :, queries], causal, ctx.scale)
            grad_q[:, :, queries] += parts[0]
            if receive is not None:  # sent while `_backward` ran
                grad_kv = receive()
            grad_kv[0][:, :, keys] += parts[1]
            grad_kv[1][:, :, keys] += parts[2]
            if group.size() > 1:
                receive = _send_to_next(grad_kv, group)
        if receive is not None:
            grad_kv = receive()  # back at its rank
        return grad_q.to(q.dtype), grad_kv[0].to(k.dtype), grad_kv[1].to(v.dtype), None, None


def _ring(kv: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[slice, slice, bool, torch.Tensor]]:
    """Circulates keys and values. Yields (queries, keys, causal, kv) once per rank, beginning with this rank.

    `kv` are the keys and values of one rank. `queries` is a slice of this rank's queries, which attends to the slice
    `keys` of `kv`. `causal` is whether a causal mask applies between the two slices.

    Args:
        kv: this rank's keys and values, `[2, batch, kv_heads, seq / ranks, head_dim]`.
    """
    rank, ranks = group.rank(), group.size()
    half = kv.shape[3] // 2
    both, front, back = slice(None), slice(0, half), slice(half, None)
    for step in range(ranks):
        receive = _send_to_next(kv, group) if step < ranks - 1 else None
        source = (rank - step) % ranks
        if step == 0:
            yield both, both, True, kv  # the chunks are in order, so the plain causal mask is correct
        elif source < rank:
            yield both, front, False, kv
        else:
            yield back, both, False, kv
        if receive is not None:
            kv = receive()


def _send_to_next(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Starts to send `tensor` to the next rank, and to receive the previous rank's tensor.

    Returns a function that waits until both are done, and returns the received tensor.
    """
    rank, ranks = group.rank(), group.size()
    received, tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor.contiguous()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, dist.get_global_rank(group, (rank + 1) % ranks), group),
            dist.P2POp(dist.irecv, received, dist.get_global_rank(group, (rank - 1) % ranks), group),
        ]
    )

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        return received

    return wait


def _forward(q, k, v, causal, scale):
    """Computes attention of queries `q` to keys `k` and values `v`.

    Returns (output `[batch, heads, queries, head_dim]`, log-sum-exp `[batch, heads, queries]`, ...).
    """
    k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    if q.device.type == "cpu":
        return flash_cpu(q.contiguous(), k, v, 0.0, causal, scale=scale)
    return flash_cuda(q, k, v, 0.0, causal, scale=scale)


def _backward(grad, q, k, v, out, lse, causal, scale):
    """Returns the gradients of q, k and v, given the gradient `grad` of the output.

    `out` and `lse` are the output and the log-sum-exp over all ranks' keys.
    """
    kv_heads = k.shape[1]
    k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    grad, q, out, lse = (x.contiguous() for x in (grad, q, out, lse))
    if q.device.type == "cpu":
        grad_q, grad_k, grad_v = flash_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    else:
        none = torch.empty(0, dtype=torch.int64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        grad_q, grad_k, grad_v = flash_cuda_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, causal, none, none, scale=scale
        )
    return grad_q, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in (grad_k, grad_v))


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats key/value heads, dimension 1 of `x`, so that there are `heads` heads."""
    return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)).contiguous()
