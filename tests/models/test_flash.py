"""Attention by flash-attn, whose functions are stood in for by what its documentation says that they do."""

import math
import sys
import types
from itertools import pairwise

import pytest
import torch
from part_cases import decoder, packed, the_same, tokens

from weft.config.errors import UserError
from weft.kernels import flash


def dense(q, k, v, seen, softmax_scale, softcap, alibi_slopes):
    """`[seq, heads, head_dim]`"""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(len(q))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.view(-1, 1, 1).to(scores) * (places.unsqueeze(1) - places).abs()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    assert causal
    assert dropout_p == 0
    assert cu_seqlens_q.dtype == torch.int32
    ends, out = cu_seqlens_k.tolist(), []
    assert max(b - a for a, b in pairwise(ends)) <= max_seqlen_q == max_seqlen_k
    for first, end in pairwise(ends):
        places = torch.arange(end - first)
        distance = places.unsqueeze(1) - places
        left, right = window_size
        seen = (distance >= 0) & (distance <= left if left >= 0 else True)
        assert right in (-1, 0)
        out.append(dense(*(x[first:end] for x in (q, k, v)), seen, softmax_scale, softcap, alibi_slopes))
    return torch.cat(out)


def flash_attn_func(q, k, v, **settings):
    batch, seq = q.shape[:2]
    ends = torch.arange(batch + 1, dtype=torch.int32) * seq
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, seq, seq, **settings)
    return out.unflatten(0, (batch, seq))


@pytest.fixture
def flash_attn(monkeypatch):
    """A package of that name, in plain PyTorch for any device; the calls of its functions."""
    calls = []

    def counted(function):
        def call(*arguments, **settings):
            calls.append(function.__name__)
            return function(*arguments, **settings)

        return call

    package = types.ModuleType("flash_attn")
    package.flash_attn_func, package.flash_attn_varlen_func = counted(flash_attn_func), counted(flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("weft.kernels.masks.flash_usable", lambda *_: True)
    return calls


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sliding_window": 5, "sliding_window_pattern": 2},
        {"attn_logit_softcapping": 2.0, "attention_multiplier": 0.3},
        {"position": "alibi"},
        {
            "mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6},
            "num_key_value_heads": 4,
        },
    ],
    ids=["plain", "windows", "softcap", "alibi", "latent"],
)
def test_flash_attn_is_asked_for_what_it_knows(flash_attn, keys):
    ours, theirs = decoder(attention_implementation="flash", **keys), decoder(**keys)
    the_same(ours, theirs)
    segments, positions = packed()
    outs = [model(tokens(), segments=segments, positions=positions) for model in (ours, theirs)]
    assert (outs[0] - outs[1]).abs().max() < 1e-9
    assert flash_attn == ["flash_attn_func"] * 2 + ["flash_attn_varlen_func"] * 2


def test_flash_attn_where_it_cannot_be_is_one_line(monkeypatch):
    model = decoder(attention_implementation="flash")
    with pytest.raises(UserError) as error:
        model(tokens())
    assert str(error.value) == (
        "model.attention_implementation: flash: flash-attn's kernels run on GPUs, and this is a cpu; set auto"
    )
    cuda = torch.device("cuda")
    with pytest.raises(UserError, match=r"know bfloat16 and float16, and this is float64; set training.dtype"):
        flash.flash_usable(cuda, torch.float64)
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="is not installed; pip install flash-attn, or set auto"):
        flash.flash_usable(cuda, torch.bfloat16)
    with torch.no_grad():
        assert not flash.flash_usable(cuda, torch.bfloat16)
        assert torch.equal(model(tokens()), decoder()(tokens()))
