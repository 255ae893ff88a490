"""flash-attn's two functions, with their signatures, computed by what its authors test their kernels against.

`attention_ref` and what it calls are from tests/test_flash_attn.py of github.com/Dao-AILab/flash-attention at 0251105
(BSD 3-Clause, copyright 2022 the respective contributors), without padding masks, dropout and reordered operations.
"""

import math
from itertools import pairwise

import torch


def attn_bias_from_alibi_slopes(slopes, seqlen_q, seqlen_k, causal=False):
    slopes = slopes.unsqueeze(-1).unsqueeze(-1)
    if causal:
        return torch.arange(-seqlen_k + 1, 1, device=slopes.device, dtype=torch.float32) * slopes
    row_idx = torch.arange(seqlen_q, device=slopes.device, dtype=torch.long).unsqueeze(-1)
    col_idx = torch.arange(seqlen_k, device=slopes.device, dtype=torch.long)
    return -slopes * torch.abs(row_idx + seqlen_k - seqlen_q - col_idx).to(dtype=slopes.dtype)


def construct_local_mask(seqlen_q, seqlen_k, window_size=(-1, -1), device=None):
    row_idx = torch.arange(seqlen_q, device=device, dtype=torch.long).unsqueeze(-1)
    col_idx = torch.arange(seqlen_k, device=device, dtype=torch.long)
    if window_size[0] < 0:
        return col_idx > row_idx + seqlen_k - seqlen_q + window_size[1]
    sk = torch.full_like(col_idx, seqlen_k)
    return torch.logical_or(
        col_idx > torch.minimum(row_idx + sk - seqlen_q + window_size[1], sk),
        col_idx < row_idx + sk - seqlen_q - window_size[0],
    )


def attention_ref(q, k, v, attn_bias=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """`[batch, seq, heads, head_dim]`, in the dtype given."""
    if causal:
        window_size = (window_size[0], 0)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q / math.sqrt(q.shape[-1]), k)
    if softcap > 0:
        scores = (scores / softcap).tanh() * softcap
    if window_size[0] >= 0 or window_size[1] >= 0:
        scores.masked_fill_(construct_local_mask(q.shape[1], k.shape[1], window_size, q.device), float("-inf"))
    if attn_bias is not None:
        scores = scores + attn_bias
    return torch.einsum("bhts,bshd->bthd", torch.softmax(scores, dim=-1).to(v.dtype), v)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    assert dropout_p == 0, "the reference drops nothing"
    if softmax_scale is not None:
        q = q * (softmax_scale * math.sqrt(q.shape[-1]))
    bias = None
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32, "as the kernels check"
        bias = attn_bias_from_alibi_slopes(alibi_slopes.expand(q.shape[0], -1), q.shape[1], k.shape[1], causal)
    return attention_ref(q, k, v, bias, causal, window_size, softcap)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    out = []
    for ends, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert ends.dtype == torch.int32, "as the kernels check"
        assert ends.diff().max() <= longest
    for (q_begin, q_end), (k_begin, k_end) in zip(
        pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True
    ):
        document = (q[None, q_begin:q_end], k[None, k_begin:k_end], v[None, k_begin:k_end])
        out.append(flash_attn_func(*document, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)[0])
    return torch.cat(out)
