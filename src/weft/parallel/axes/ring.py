"""Ring attention (Liu et al., 2023): keys and values go round, and no rank ever holds all of them.

A rank has a piece from the row's front and one from its end (`Context.places`). So in each turn it has as much to do as
every other: keys of an earlier rank are seen, their front piece, by all of its queries; those of a later one, both
pieces, by its later half. What PyTorch's fused kernel gives for one rank's keys is put together by the softmax's sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from weft.torch_private import flash_cpu, flash_cpu_backward, flash_cuda, flash_cuda_backward


@torch.compiler.disable
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, group: dist.ProcessGroup
) -> torch.Tensor:
    """Causal attention of whole rows.

    Args:
        q: `[batch, heads, seq / ranks, head_dim]`, the rank's two pieces one after the other.
        k, v: `[batch, kv_heads, seq / ranks, head_dim]`; `kv_heads` divides `heads`, and both have one head size.
        scale: default `1 / sqrt(head_dim)`.

    Returns:
        `[batch, heads, seq / ranks, head_dim]`
    """
    return _Ring.apply(q, k, v, scale, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, group):
        out, sums = torch.Tensor(), torch.Tensor()  # the first turn gives them
        for turn, (rows, keys, causal, (some_k, some_v)) in enumerate(_turns(torch.stack((k, v)), group)):
            one, one_sums, *_ = _forward(q[:, :, rows], some_k[:, :, keys], some_v[:, :, keys], causal, scale)
            one, one_sums = one.to(one_sums.dtype), one_sums.unsqueeze(-1)
            if turn == 0:
                out, sums = one, one_sums
                continue
            before = sums[:, :, rows]
            together = torch.logaddexp(before, one_sums)
            out[:, :, rows] = out[:, :, rows] * (before - together).exp() + one * (one_sums - together).exp()
            sums[:, :, rows] = together
        out, sums = out.to(q.dtype), sums.squeeze(-1)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, out, sums = ctx.saved_tensors
        group, ranks = ctx.group, ctx.group.size()
        to_q = torch.zeros(q.shape, dtype=sums.dtype, device=q.device)
        own = torch.stack((k, v))
        to_kv = torch.zeros(own.shape, dtype=sums.dtype, device=q.device)  # of whose keys are here; goes round as well
        for rows, keys, causal, (some_k, some_v) in _turns(own, group):
            parts = (x[:, :, rows] for x in (grad, q))
            inputs = (*parts, some_k[:, :, keys], some_v[:, :, keys], out[:, :, rows], sums[:, :, rows])
            of_q, of_k, of_v = _backward(*inputs, causal, ctx.scale)
            to_q[:, :, rows] += of_q
            to_kv[0][:, :, keys] += of_k
            to_kv[1][:, :, keys] += of_v
            if ranks > 1:
                to_kv = _passed_on(to_kv, group)  # at the end it has come home
        return to_q.to(q.dtype), to_kv[0].to(k.dtype), to_kv[1].to(v.dtype), None, None


def _turns(own: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[slice, slice, bool, torch.Tensor]]:
    """Which queries see which keys, whether only up to their own, and the keys and values, from all ranks in turn."""
    rank, ranks = group.rank(), group.size()
    half, held = own.shape[3] // 2, own
    everything, front, end = slice(None), slice(0, half), slice(half, None)
    for turn in range(ranks):
        waiting = _passing_on(held, group) if turn < ranks - 1 else None
        whose = (rank - turn) % ranks
        if turn == 0:
            yield everything, everything, True, held  # two pieces in order: causality needs no more
        elif whose < rank:
            yield everything, front, False, held
        else:
            yield end, everything, False, held
        if waiting is not None:
            held = waiting()


def _passing_on(tensor: torch.Tensor, group: dist.ProcessGroup):
    """Give it to the next rank; the result waits for the one before."""
    rank, ranks = group.rank(), group.size()
    coming, tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format), tensor.contiguous()
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, dist.get_global_rank(group, (rank + 1) % ranks), group),
            dist.P2POp(dist.irecv, coming, dist.get_global_rank(group, (rank - 1) % ranks), group),
        ]
    )

    def wait() -> torch.Tensor:
        for one in work:
            one.wait()
        return coming

    return wait


def _passed_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _passing_on(tensor, group)()


def _forward(q, k, v, causal, scale):
    """`[batch, heads, queries, head_dim]` and the logarithms of the softmax's sums `[batch, heads, queries]`."""
    k, v = (_for_all_heads(x, q.shape[1]) for x in (k, v))
    if q.device.type == "cpu":
        return flash_cpu(q.contiguous(), k, v, 0.0, causal, scale=scale)
    return flash_cuda(q, k, v, 0.0, causal, scale=scale)


def _backward(grad, q, k, v, out, sums, causal, scale):
    """The gradients of q, k and v, given the whole softmax's output and sums."""
    heads = k.shape[1]
    k, v = (_for_all_heads(x, q.shape[1]) for x in (k, v))
    grad, q, out, sums = (x.contiguous() for x in (grad, q, out, sums))
    if q.device.type == "cpu":
        of_q, of_k, of_v = flash_cpu_backward(grad, q, k, v, out, sums, 0.0, causal, scale=scale)
    else:
        none = torch.empty(0, dtype=torch.int64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        of_q, of_k, of_v = flash_cuda_backward(grad, q, k, v, out, sums, *lengths, 0.0, causal, none, none, scale=scale)
    return of_q, *(x.unflatten(1, (heads, -1)).sum(2) for x in (of_k, of_v))


def _for_all_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values, as often as heads of queries look at them."""
    return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)).contiguous()
