"""Attention inside documents, in every form, against a softmax written out."""

import pytest
import torch

from weft.kernels import document_attention as kernel
from weft.kernels.attention import Scores, attention
from weft.kernels.document_attention import block_mask, document_attention, segment_mask
from weft.kernels.masks import attention_mask

CPU = {"dtype": torch.float64, "head_dim": 8}


def mask_of(q, segments, dropout=0.0):
    return attention_mask(segments, segments, dtype=q.dtype, head_dim=q.shape[3], dropout=dropout)


def rows(lengths, seq):
    """Segments of one row for documents of these lengths, the last one as long as it takes."""
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    return (numbers + [len(lengths)] * seq)[:seq]


def some_segments(seq, seed=0):
    """`[3, seq]`: a row of short documents, one of a single document, and one whose first number comes again."""
    lengths = torch.randint(1, max(2, seq // 3), (seq,), generator=torch.Generator().manual_seed(seed)).tolist()
    again = [0] * (seq // 2) + [1] + [0] * seq
    return torch.tensor([rows(lengths, seq), [7] * seq, again[:seq]])


def written_out(q, k, v, segments, scale=None):
    """Query by query, over the keys of its run up to itself."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        start = 0
        for i in range(q.shape[2]):
            if i and segments[b, i] != segments[b, i - 1]:
                start = i
            for h in range(q.shape[1]):
                weights = (k[b, h // group, start : i + 1] @ q[b, h, i] * scale).softmax(0)
                out[b, h, i] = weights @ v[b, h // group, start : i + 1]
    return out


def drawn(seq, heads, kv_heads, head_dim=8, dtype=torch.float64, device="cpu", batch=3):
    torch.manual_seed(seq)
    shapes = [(batch, heads, seq, head_dim), *[(batch, kv_heads, seq, head_dim)] * 2]
    # Laid out as the projections give them: heads within a token.
    return [
        torch.randn(b, s, h, d, dtype=dtype, device=device).transpose(1, 2).requires_grad_() for b, h, s, d in shapes
    ]


@pytest.mark.parametrize("form", ["segments", "one by one", "long ones one by one", "boolean mask"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("seq", "scale"), [(1, None), (2, None), (23, None), (23, 0.2)])
def test_every_form_is_the_softmax_written_out(form, heads, kv_heads, seq, scale, monkeypatch):
    monkeypatch.setattr(kernel, "SHORT", {"one by one": 0, "long ones one by one": 4}.get(form, kernel.SHORT))
    q, k, v = drawn(seq, heads, kv_heads)
    segments = some_segments(seq)
    mask = segment_mask(segments) if form == "boolean mask" else mask_of(q, segments)
    ours = attention(q, k, v, causal=True, mask=mask, scores=Scores(scale))
    expected = written_out(q, k, v, segments, scale)
    assert (ours - expected).abs().max() < 1e-12
    grad = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        assert (got - wanted).abs().max() < 1e-12


def test_one_document_a_row_is_plain_causal_attention():
    q, k, v = drawn(40, 4, 4, dtype=torch.float32)
    ours = attention(q, k, v, causal=True, mask=mask_of(q, torch.zeros(3, 40, dtype=torch.int64)))
    assert torch.allclose(ours, attention(q, k, v, causal=True), atol=1e-6)


@pytest.mark.parametrize("short", [0, 180])
def test_bfloat16_is_as_near_as_its_rounding(short, monkeypatch):
    monkeypatch.setattr(kernel, "SHORT", short)
    q, k, v = drawn(70, 4, 2)
    exact = written_out(q.bfloat16().double(), k.bfloat16().double(), v.bfloat16().double(), some_segments(70))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    ours = attention(q, k, v, causal=True, mask=mask_of(q, some_segments(70)))
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().max() < 0.02


@pytest.mark.parametrize("short", [0, 180])
def test_gradients_that_are_one_number_shown_many_times_are_understood(short, monkeypatch):
    monkeypatch.setattr(kernel, "SHORT", short)
    q, k, v = drawn(11, 2, 2)
    segments = some_segments(11)
    for x in (q, k, v):
        ours = torch.autograd.grad(attention(q, k, v, causal=True, mask=mask_of(q, segments)).sum(), x)[0]
        assert torch.allclose(ours, torch.autograd.grad(written_out(q, k, v, segments).sum(), x)[0])


def test_dropout_drops_weights_and_lets_nothing_through_between_documents():
    q, k, v = drawn(12, 2, 2)
    segments = torch.tensor([rows([5, 4], 12)] * 3)
    torch.manual_seed(0)
    dropped = attention(q, k, v, causal=True, mask=mask_of(q, segments, dropout=0.5), dropout=0.5)
    assert not torch.allclose(dropped, attention(q, k, v, causal=True, mask=mask_of(q, segments)))
    (gradient,) = torch.autograd.grad(dropped[:, :, 5:9].sum(), v)
    assert gradient[:, :, 5:9].abs().sum() > 0
    assert gradient[:, :, :5].abs().sum() == gradient[:, :, 9:].abs().sum() == 0


@pytest.mark.parametrize("how", [{"dropout": 0.5}, {"scores": Scores(softcap=2.0)}])
def test_segments_stand_for_their_mask_where_the_document_kernel_does_not_compute(how):
    q, k, v = drawn(12, 2, 2)
    segments = torch.tensor([rows([5, 4], 12)] * 3)
    found = []
    for mask in (segments, segment_mask(segments)):
        torch.manual_seed(0)
        found.append(attention(q, k, v, causal=True, mask=mask, **how))
    assert torch.equal(*found)
    assert not torch.allclose(found[0], attention(q, k, v, causal=True, mask=segments))
    with pytest.raises(ValueError, match="dropout"):
        attention(q, k, v, causal=True, mask=block_mask(segments), dropout=0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_operator_keeps_pytorchs_rules(dtype):
    q, k, v = (x.to(dtype) for x in drawn(9, 2, 2))
    torch.library.opcheck(document_attention, (q, k, v, some_segments(9), None))


@pytest.mark.parametrize("seq", [1, 100, 128, 129, 700, 1024])
@pytest.mark.parametrize("window", [None, 50, 129])
def test_the_table_of_blocks_is_the_one_that_pytorch_finds(seq, window):
    from torch.nn.attention.flex_attention import create_block_mask

    segments = torch.cat([some_segments(seq), torch.tensor([rows([128, 256, 1, 127], seq), rows([300, 5], seq)])])
    starts = segment_mask(segments, window).int().argmax(3).squeeze(1)  # the first key that each query sees

    def visible(batch, head, query, key):
        return (key <= query) & (key >= starts[batch, query])

    expected = create_block_mask(visible, 5, None, seq, seq, device="cpu")
    ours = block_mask(segments, window)
    assert ours.shape == (5, 1, seq, seq)
    for part in ("kv", "full_kv", "q", "full_q"):
        numbers, blocks = getattr(ours, f"{part}_num_blocks"), getattr(ours, f"{part}_indices")
        assert torch.equal(numbers, getattr(expected, f"{part}_num_blocks")), part
        wanted = getattr(expected, f"{part}_indices")
        for place in torch.cartesian_prod(*map(torch.arange, numbers.shape)).tolist():
            count = int(numbers[tuple(place)])
            assert torch.equal(blocks[tuple(place)][:count], wanted[tuple(place)][:count]), part


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_reads_the_table():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = drawn(300, 4, 2, head_dim=16, dtype=torch.float32)
    segments = some_segments(300)
    q, k, v = (x.detach() for x in (q, k, v))
    ours = flex_attention(q, k, v, block_mask=block_mask(segments), enable_gqa=True)  # uncompiled: slow, but everywhere
    expected = attention(q, k, v, causal=True, mask=segment_mask(segments))
    assert torch.allclose(ours, expected, atol=1e-5)


def test_each_device_and_precision_gets_its_form():
    segments = some_segments(8)
    assert attention_mask(segments, segments, **CPU) is segments
    assert attention_mask(segments, segments, **CPU, dropout=0.1).dtype == torch.bool
    assert attention_mask(segments.to("meta"), segments.to("meta"), **CPU).dtype == torch.bool


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 64), (4, 4, 128), (2, 2, 48), (2, 1, 8)]
)
@pytest.mark.parametrize("seq", [64, 500, 1024])
def test_on_a_gpu_it_is_the_reference_forward_and_backward(dtype, heads, kv_heads, head_dim, seq):
    torch.set_float32_matmul_precision("highest")
    q, k, v = drawn(seq, heads, kv_heads, head_dim, dtype, "cuda")
    segments = some_segments(seq).cuda()
    mask = attention_mask(segments, segments, dtype=dtype, head_dim=head_dim)
    assert isinstance(mask, torch.Tensor) == (dtype == torch.float64 or head_dim < 16)
    ours = attention(q, k, v, causal=True, mask=mask)
    assert ours.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention(*exact, causal=True, mask=segment_mask(segments))
    bound = {torch.bfloat16: 0.02, torch.float32: 5e-4, torch.float64: 1e-12}[dtype]
    assert (ours - expected).abs().max() < bound * expected.abs().max()
    grad = torch.randn_like(ours)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    for got, wanted in zip(torch.autograd.grad(ours, (q, k, v), grad), theirs, strict=True):
        assert (got - wanted).abs().max() < bound * wanted.abs().max()


@pytest.mark.gpu
def test_on_a_gpu_flex_attention_holds_no_whole_matrix():
    segments = torch.tensor([rows([3000, 5000, 200], 16384)], device="cuda")
    q, k, v = drawn(16384, 4, 4, 64, torch.bfloat16, "cuda", batch=1)
    attention(q, k, v, causal=True, mask=mask_of(q, segments)).sum().backward()  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, causal=True, mask=mask_of(q, segments)).sum().backward()
    assert (
        torch.cuda.max_memory_allocated() - before < 16384 * 16384 / 2
    )  # bytes; a boolean mask alone has twice as many


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("documents_apart", [True, False])
def test_penalties_on_distance(documents_apart, window):
    """ALiBi, query by query; in the mask for the fused kernel, and in the scores beside a boolean mask."""
    q, k, v = (torch.randn(3, 4, 23, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    segments = some_segments(23) if documents_apart else torch.zeros(3, 23, dtype=torch.int64)
    seen = segment_mask(segments, window)
    expected = torch.empty_like(q)
    for b, h, i in [(b, h, i) for b in range(3) for h in range(4) for i in range(23)]:
        keys = [j for j in range(23) if seen[b, 0, i, j]]
        scores = torch.stack([q[b, h, i] @ k[b, h, j] * 8**-0.5 - slopes[h] * (i - j) for j in keys])
        expected[b, h, i] = scores.softmax(0) @ v[b, h, keys]
    given = segments if documents_apart else None
    mask = attention_mask(segments, given, sparse=window, slopes=slopes, **CPU)
    assert mask.is_floating_point()
    for one in (mask, seen):
        out = attention(q, k, v, causal=True, mask=one, scores=Scores(slopes=slopes))
        torch.testing.assert_close(out, expected)
        wanted = torch.autograd.grad(expected, (q, k, v), torch.ones_like(q), retain_graph=True)
        for mine, theirs in zip(torch.autograd.grad(out, (q, k, v), torch.ones_like(q)), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
