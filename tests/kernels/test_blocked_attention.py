"""Causal attention in bfloat16 by blocks of products, against attention in float64."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from weft.kernels import blocked_attention as module
from weft.kernels import masks
from weft.kernels.attention import Scores, alibi_slopes, attention
from weft.kernels.blocked_attention import Window
from weft.kernels.document_attention import segment_mask
from weft.kernels.masks import attention_mask
from weft.kernels.processor import features

OPERATOR = "weft::blocked_attention"


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Whatever the processor is."""
    monkeypatch.setattr(module, "FASTER", True)


def tensors(batch=2, heads=4, kv_heads=4, seq=40, size=16, value_size=None, factor=1.0):
    torch.manual_seed(0)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size or size), (heads, value_size or size)]
    return [torch.randn(batch, seq, n, d).mul_(factor).bfloat16().transpose(1, 2) for n, d in shapes]


def results(function, given, dtype=torch.bfloat16):
    q, k, v, grad = given
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]


def exact(q, k, v, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def operators(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return [event.name for event in profile.events() or []]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"seq": 300},  # three blocks, the last one short
        {"seq": 256, "kv_heads": 2},
        {"seq": 130, "kv_heads": 1, "size": 24},
        {"seq": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients_are_those_of_float64(shape, scale):
    given = tensors(**shape)
    expected = results(lambda *x: exact(*x, scale), given, dtype=torch.float64)
    found = results(lambda *x: attention(*x, causal=True, scores=Scores(scale)), given)
    for mine, right in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert mine.shape == right.shape
        assert error(mine, right) < 0.007


@pytest.mark.parametrize("window", [1, 100, 128, 129, 200])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_sliding_windows_are_those_of_float64(window, kv_heads):
    given, mask = tensors(seq=300, kv_heads=kv_heads), Window(window)
    seen = torch.ones(300, 300, dtype=torch.bool).tril().triu(1 - window)
    expected = results(lambda *x: attention(*x, causal=True, mask=seen), given, dtype=torch.float64)
    found = results(lambda *x: attention(*x, causal=True, mask=mask), given)
    assert OPERATOR in operators(lambda: attention(*given[:3], causal=True, mask=mask))
    for mine, right in zip(found, expected, strict=True):
        assert error(mine, right) < 0.007 if right.any() else not mine.any()
    wide = [x.double() for x in given[:3]]  # another kernel computes what this one does not
    torch.testing.assert_close(attention(*wide, causal=True, mask=mask), expected[0])


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_slopes_are_those_of_float64(kv_heads):
    given, slopes = tensors(seq=300, kv_heads=kv_heads), alibi_slopes(4, 8.0, torch.device("cpu"))
    expected = results(lambda *x: attention(*x, causal=True, scores=Scores(slopes=slopes)), given, dtype=torch.float64)
    mask = attention_mask(torch.zeros(2, 300), None, dtype=torch.bfloat16, head_dim=16, slopes=slopes)
    found = results(lambda *x: attention(*x, causal=True, mask=mask, scores=Scores(slopes=slopes)), given)
    assert OPERATOR in operators(lambda: attention(*given[:3], causal=True, mask=mask, scores=Scores(slopes=slopes)))
    for mine, right in zip(found, expected, strict=True):
        assert error(mine, right) < 0.007


@pytest.mark.parametrize(("softcap", "factor"), [(50.0, 1.0), (2.0, 1.5)])
@pytest.mark.parametrize("window", [None, 100])
def test_soft_caps_are_those_of_float64(softcap, factor, window):
    given, how = tensors(seq=300, kv_heads=2, factor=factor), Scores(softcap=softcap)
    seen = torch.ones(300, 300, dtype=torch.bool).tril().triu(1 - (window or 300))
    expected = results(lambda *x: attention(*x, causal=True, mask=seen, scores=how), given, dtype=torch.float64)
    mask = None if window is None else Window(window)
    found = results(lambda *x: attention(*x, causal=True, mask=mask, scores=how), given)
    assert OPERATOR in operators(lambda: attention(*given[:3], causal=True, mask=mask, scores=how))
    for mine, right in zip(found, expected, strict=True):
        assert error(mine, right) < 0.012


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("alibi", [False, True])
def test_a_soft_cap_in_float32_is_computed_by_blocks(window, alibi, monkeypatch):
    """On each processor: elsewhere it needs all scores."""
    monkeypatch.setattr(module, "FASTER", False)
    given = [x.float() for x in tensors(seq=300, kv_heads=2, factor=2.0)]
    how = Scores(softcap=3.0, slopes=alibi_slopes(4, 8.0, torch.device("cpu")) if alibi else None)
    options = {"head_dim": 16, "sparse": window, "softcap": True, "slopes": how.slopes}
    mask = attention_mask(torch.zeros(2, 300), None, dtype=torch.float32, **options)
    seen = torch.ones(300, 300, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(1 - window)
    expected = results(lambda *x: attention(*x, causal=True, mask=seen, scores=how), given, dtype=torch.float64)
    found = results(lambda *x: attention(*x, causal=True, mask=mask, scores=how), given, dtype=torch.float32)
    assert OPERATOR in operators(lambda: attention(*given[:3], causal=True, mask=mask, scores=how))
    for mine, right in zip(found, expected, strict=True):
        assert error(mine, right) < 2e-6


def packed(lengths, batch=2):
    """Documents of these lengths in the first sequence, and in reverse order in the others."""
    rows = [lengths, *[lengths[::-1]] * (batch - 1)]
    return torch.stack([torch.arange(len(x)).repeat_interleave(torch.tensor(x)) for x in rows])


@pytest.mark.parametrize("lengths", [None, [90, 1, 150, 59]], ids=str)
@pytest.mark.parametrize("window", [None, 140])
@pytest.mark.parametrize("options", [set(), {"slopes"}, {"sinks"}, {"slopes", "softcap", "sinks"}], ids=sorted)
def test_scores_and_documents_in_float32_are_those_of_float64(lengths, window, options, monkeypatch):
    """On each processor: elsewhere these options need all scores, or a mask of all tokens."""
    monkeypatch.setattr(module, "FASTER", False)
    monkeypatch.setattr(masks, "LONG", 256)
    given, segments = [x.float() for x in tensors(seq=300, kv_heads=2, factor=2.0)], lengths and packed(lengths)
    sinks = torch.tensor([3.0, -1.0, 0.0, 40.0], requires_grad=True) if "sinks" in options else None
    slopes = alibi_slopes(4, 8.0, torch.device("cpu")) if "slopes" in options else None
    how = Scores(softcap=3.0 if "softcap" in options else None, slopes=slopes, sinks=sinks)
    seen = torch.ones(300, 300, dtype=torch.bool).tril().triu(1 - (window or 300)).expand(2, 1, 300, 300)
    if segments is not None:
        seen = seen & (segments.unsqueeze(2) == segments.unsqueeze(1)).unsqueeze(1)
    settings = {"sparse": window, "softcap": "softcap" in options, "sinks": "sinks" in options, "slopes": slopes}
    mask = attention_mask(torch.zeros(2, 300), segments, dtype=torch.float32, head_dim=16, **settings)

    def run(dtype, chosen):
        leaves = [x.to(dtype).requires_grad_() for x in given[:3]] + ([] if sinks is None else [sinks])
        out = attention(*leaves[:3], causal=True, mask=chosen, scores=how)
        return [out, *torch.autograd.grad(out, leaves, given[3].to(dtype))]

    found = run(torch.float32, mask)
    for mine, right in zip(found, run(torch.float64, seen), strict=True):
        assert mine.shape == right.shape
        assert error(mine, right) < 3e-6
    other = window is None and not options  # plain attention, for which another kernel is faster
    assert (OPERATOR in operators(lambda: run(torch.float32, mask))) != other
    if isinstance(mask, Window):  # which another kernel also takes
        torch.testing.assert_close(
            attention(*(x.double() for x in given[:3]), causal=True, mask=mask, scores=how), run(torch.float64, seen)[0]
        )


def test_a_window_in_float32_is_computed_by_blocks_in_long_sequences(monkeypatch):
    monkeypatch.setattr(module, "FASTER", False)
    options = {"dtype": torch.float32, "head_dim": 16, "sparse": 128}
    assert attention_mask(torch.zeros(1, 2048), None, **options) == Window(128)
    assert isinstance(attention_mask(torch.zeros(1, 512), None, **options), torch.Tensor)


def test_a_window_has_no_mask_of_all_tokens():
    found = attention_mask(torch.zeros(1, 1 << 20), None, dtype=torch.bfloat16, head_dim=16, sparse=1 << 12)
    assert found == Window(1 << 12)


def test_rounding_of_large_scores_is_that_of_queries_and_keys():
    q, k, v, _ = (x.double() for x in tensors(seq=150, factor=3.0))  # scores of up to about 100
    q, k = (x * (1 + 0.002 * torch.randn_like(x)) for x in (q, k))  # not representable in bfloat16
    expected = exact(q, k, v, None)
    rounded = [x.bfloat16() for x in (q, k, v)]
    assert error(attention(*rounded, causal=True), expected) < 2 * error(exact(*rounded, None), expected)


def test_values_can_be_narrower_than_keys():
    given = tensors(seq=140, value_size=8)
    expected = results(lambda *x: exact(*x, None), given, dtype=torch.float64)
    for mask in (None, Window(140)):  # of which the longest sees all keys
        found = results(lambda *x, mask=mask: attention(*x, causal=True, mask=mask), given)
        assert max(error(mine, right) for mine, right in zip(found, expected, strict=True)) < 0.006
    narrow = attention(*given[:3], causal=True, mask=Window(3))
    assert error(narrow[:, :, :3], attention(*given[:3], causal=True)[:, :, :3]) < 0.006
    assert error(narrow, attention(*given[:3], causal=True)) > 0.1


def test_documents_are_computed_apart():
    """All in blocks of the whole sequence."""
    given = tensors(seq=460, kv_heads=2)
    lengths = torch.tensor([200, 1, 30, 33, 196])
    segments = torch.arange(5).repeat_interleave(lengths).expand(2, -1).contiguous()
    apart = segments[:, None, :, None] == segments[:, None, None, :]
    mask = apart & torch.ones(460, 460, dtype=torch.bool).tril()
    expected = results(
        lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask, enable_gqa=True), given, dtype=torch.float64
    )
    found = results(lambda *x: attention(*x, causal=True, mask=segments), given)
    for mine, right in zip(found, expected, strict=True):
        assert error(mine, right) < 0.007
    assert OPERATOR in operators(lambda: attention(*given[:3], causal=True, mask=segments))


@pytest.mark.parametrize("lengths", [[700], [90, 30, 400, 180]])
def test_keys_of_a_few_lengths_are_those_of_float64(lengths, monkeypatch):
    monkeypatch.setattr(module, "LENGTHS", 2)  # as in a sequence of more than 4,096 tokens
    given = tensors(batch=1, seq=700)
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    seen = segment_mask(segments)
    expected = results(lambda *x: F.scaled_dot_product_attention(*x, attn_mask=seen), given, torch.float64)
    found = results(lambda *x: attention(*x, causal=True, mask=segments if len(lengths) > 1 else None), given)
    assert max(map(error, found, expected)) < 0.01


@pytest.mark.parametrize(("window", "lengths", "longest"), [(None, 32, 8192), (200, 4, 512)])
def test_a_long_sequence_has_keys_of_a_few_lengths(window, lengths, longest, monkeypatch):
    found, multiply = [], torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda *x, **how: found.append(x[2].shape[-1]) or multiply(*x, **how))
    q, k, v, _ = tensors(batch=1, heads=1, kv_heads=1, seq=8192)
    attention(q, k, v, causal=True, mask=None if window is None else Window(window))
    assert len(found) == 64
    assert len(set(found)) <= lengths
    assert max(found) <= longest


GROWTH = """
import psutil, torch
from weft.kernels.attention import attention
torch.manual_seed(0)
memory = []
for _ in range(10):
    segments = (torch.rand(4, 2048) < 1 / 400).cumsum(1)
    q, k, v = (torch.randn(4, 2, 2048, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attention(q, k, v, causal=True, mask=segments).sum().backward()
    memory.append(psutil.Process().memory_info().rss)
print(memory[-1] - memory[1])
"""


@pytest.mark.skipif("avx512_bf16" not in features(), reason="other processors compute bfloat16 in float32")
def test_documents_whose_lengths_differ_in_each_batch_need_no_more_memory():
    """oneDNN keeps the code of products of up to 1,024 shapes."""
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 150e6


def test_later_tokens_do_not_change_earlier_results():
    q, k, v, _ = tensors(seq=200)
    before = attention(q, k, v, causal=True)
    k[:, :, 150:] = 5.0
    v[:, :, 150:] = 5.0
    after = attention(q, k, v, causal=True)
    assert torch.equal(before[:, :, :150], after[:, :, :150])
    assert not torch.equal(before[:, :, 150:], after[:, :, 150:])


@pytest.mark.parametrize("segments", [None, torch.arange(140).div(50, rounding_mode="floor").expand(2, -1)])
def test_compiled_code_has_the_same_results(segments):
    given = tensors(seq=140)

    def compute(q, k, v):
        return attention(q, k, v, causal=True, mask=segments)

    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    for mine, eager in zip(results(compiled, given), results(compute, given), strict=True):
        assert torch.equal(mine, eager)


def test_a_batch_without_sequences_is_left_to_other_kernels():
    q, k, v, _ = tensors(batch=0, kv_heads=2)
    for how in (Scores(), Scores(sinks=torch.zeros(4))):
        assert attention(q, k, v, causal=True, scores=how).shape == q.shape


def test_it_computes_causal_attention_in_bfloat16_only():
    q, k, v, _ = tensors()
    assert OPERATOR in operators(lambda: attention(q, k, v, causal=True))
    others = [
        lambda: attention(q, k, v, causal=False),
        lambda: attention(q, k, v, causal=True, dropout=0.1),
        lambda: attention(q.float(), k.float(), v.float(), causal=True),
        lambda: attention(q[:, :, -1:], k, v, causal=True),  # a step of generation with a KV cache
        lambda: attention(q[:, :, -9:], k, v, causal=True),
    ]
    assert not any(OPERATOR in operators(one) for one in others)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert OPERATOR not in operators(lambda: attention(q, k, v, causal=True))


def test_backward_within_autocast_follows_forward():
    given = tensors(seq=220)
    segments = torch.arange(4).repeat_interleave(torch.tensor([190, 3, 20, 7])).expand(2, -1).contiguous()
    for mask in (None, segments):
        leaves = [x.requires_grad_() for x in given[:3]]
        expected = torch.autograd.grad(attention(*leaves, causal=True, mask=mask), leaves, given[3])
        out = attention(*leaves, causal=True, mask=mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.autograd.grad(out, leaves, given[3])
        for mine, right in zip(found, expected, strict=True):
            assert torch.equal(mine, right)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_operator_is_registered_correctly(batch):
    q, k, v, grad = tensors(batch, seq=140, kv_heads=2)
    starts = (torch.arange(140) - 8).clamp(min=0).expand(batch, -1)
    for more in ((), (starts, torch.rand(4), 20.0, torch.rand(4))):  # a window, slopes, a soft cap and sinks
        torch.library.opcheck(module.blocked_attention_backward, (grad, q, k, v, 0.25, *more))
        leaves = (x.detach().requires_grad_() for x in (q, k, v))
        torch.library.opcheck(module.blocked_attention, (*leaves, 0.25, *more))
