"""Sparse patterns against the papers' definitions, written out pair by pair, and their masks in every form."""

import pytest
import torch

from weft.config.components import COMPONENT_KINDS, built_ins, load_class
from weft.kernels.attention import attention
from weft.kernels.masks import (
    attention_mask,
    pattern_block_mask,
    pattern_mask,
    sparse_block_mask,
)
from weft.kernels.patterns.bigbird import BigBird

SEQ = 70


def sliding(i, j, window):
    return j in range(i - window + 1, i + 1)


def strided(i, j, stride):
    """Child et al., section 4.3: A1 = {t, ..., i} for t = max(0, i - l); A2 = {j: (i - j) mod l = 0}."""
    return j in range(max(0, i - stride), i + 1) or (i - j) % stride == 0


def fixed(i, j, stride, expressivity=1):
    """A1 = {j: floor(j / l) = floor(i / l)}; A2 = {j: j mod l in {l - c, ..., l - 1}}."""
    return j // stride == i // stride or j % stride in range(stride - expressivity, stride)


def longformer(i, j, window, dilation=1, global_tokens=1):
    return j in range(global_tokens) or j in [i - step * dilation for step in range(window)]


def bigbird(i, j, block_size=64, window=3, global_blocks=1, random_blocks=3, seed=0):
    """Zaheer et al., section 2, in blocks: the window, the global ones, and some of those between."""
    block, other = i // block_size, j // block_size
    if other in range(block - window + 1, block + 1) or other in range(global_blocks):
        return True
    between = list(range(global_blocks, block - window + 1))
    for draw in range(random_blocks):
        stretch = between[draw * len(between) // random_blocks : (draw + 1) * len(between) // random_blocks]
        if stretch and stretch[hashed(block, draw, seed) % len(stretch)] == other:
            return True
    return False


def hashed(block, draw, seed):
    number = (block * 0x41C64E6D + (seed * 0x2545F491 + draw * 0x5851F42D) % 2**31) % 2**31
    for factor in (0x2C1B3C6D, 0x297A2D39):
        number = (number ^ number // 2**15) * factor % 2**31
    return number ^ number // 2**15


CASES = [
    (sliding, {"window": 1}),
    (sliding, {"window": 9}),
    (strided, {"stride": 1}),
    (strided, {"stride": 8}),
    (fixed, {"stride": 8}),
    (fixed, {"stride": 7, "expressivity": 3}),
    (longformer, {"window": 5}),
    (longformer, {"window": 4, "dilation": 3, "global_tokens": 2}),
    (longformer, {"window": 2, "global_tokens": 0}),
    (bigbird, {"block_size": 4, "window": 2, "random_blocks": 2, "seed": 5}),
    (bigbird, {"block_size": 3, "window": 1, "global_blocks": 0, "random_blocks": 4}),
    (bigbird, {"block_size": 5, "global_blocks": 2, "random_blocks": 0}),
]
each = pytest.mark.parametrize(("literal", "keys"), CASES, ids=lambda part: getattr(part, "__name__", None))


def made(literal, keys):
    return load_class(literal.__name__, "attention_pattern")(**keys)


def expected(literal, keys, starts):
    """bool `[seq, seq]`: causal, within the document that each token's start names, places counted from there."""
    seen = torch.zeros(len(starts), len(starts), dtype=torch.bool)
    for i, start in enumerate(starts):
        for j in range(start, i + 1):
            seen[i, j] = literal(i - start, j - start, **keys)
    return seen


def documents(*lengths):
    """Segments and starts of one row."""
    segments = [number for number, length in enumerate(lengths) for _ in range(length)]
    return segments, [segments.index(number) for number in segments]


def test_every_built_in_pattern_is_here():
    assert set(built_ins("attention_pattern")) == {literal.__name__ for literal, _ in CASES}
    assert COMPONENT_KINDS["attention_pattern"].folder == "kernels/patterns"


@each
def test_a_pattern_is_what_its_paper_says_also_within_documents(literal, keys):
    rows = [documents(SEQ), documents(13, 1, 40, 16)]
    ours = pattern_mask(made(literal, keys), torch.tensor([segments for segments, _ in rows]))
    assert ours.shape == (2, 1, SEQ, SEQ)
    for row, (_, starts) in enumerate(rows):
        assert torch.equal(ours[row, 0], expected(literal, keys, starts))


def test_random_blocks_are_distinct_seeded_and_the_same_at_any_length():
    def between(seed, length=400, random_blocks=3):
        pattern = BigBird(block_size=1, window=1, global_blocks=0, random_blocks=random_blocks, seed=seed)
        return pattern_mask(pattern, torch.zeros(1, length, dtype=torch.int64))[0, 0].tril(-1)

    assert torch.equal(between(1).sum(1), torch.arange(400).clamp(max=3))
    assert torch.equal(between(1)[:90, :90], between(1, 90))
    assert not torch.equal(between(1), between(2))
    places = torch.cat([row.nonzero().flatten() / max(1, i) for i, row in enumerate(between(1)[100:], 100)])
    assert abs(places.mean() - 0.5) < 0.03  # spread over all that came before


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@each
@pytest.mark.parametrize("apart", [False, True])
def test_flex_attention_reads_the_pattern(literal, keys, apart):
    from torch.nn.attention.flex_attention import flex_attention

    seq, pattern = 200, made(literal, keys)
    segments = torch.tensor([documents(seq)[0], documents(30, 130, 40)[0] if apart else documents(seq)[0]])
    table = (
        sparse_block_mask(segments, None, pattern) if apart else pattern_block_mask(pattern, seq, torch.device("cpu"))
    )
    q, k, v = torch.randn(3, 2, 4, seq, 16)
    ours = flex_attention(q, k, v, block_mask=table)
    assert torch.allclose(ours, attention(q, k, v, causal=True, mask=pattern_mask(pattern, segments)), atol=1e-5)


def test_on_a_gpu_tables_skip_what_nobody_sees_and_are_made_once():
    table = pattern_block_mask(window := made(sliding, {"window": 64}), 4096, torch.device("cpu"))
    assert table.sparsity() > 90
    assert pattern_block_mask(window, 4096, torch.device("cpu")) is table


def test_each_device_gets_its_form():
    tokens, pattern = torch.zeros(2, 8, dtype=torch.int64), made(sliding, {"window": 2})
    settings = {"dtype": torch.float32, "head_dim": 16}
    for device in ("cpu", "meta"):
        mask = attention_mask(tokens.to(device), None, sparse=pattern, **settings)
        assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 8, 8))
    assert attention_mask(tokens, None, **settings) is None
    assert attention_mask(tokens, None, sparse=8, **settings) is None
    assert attention_mask(tokens, None, sparse=7, **settings).dtype == torch.bool
    assert attention_mask(tokens, tokens, implementation="flex", **settings) is tokens
    assert attention_mask(tokens, tokens, implementation="my:CustomClass", **settings).dtype == torch.bool


@pytest.mark.gpu
@each
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_the_blocks_are_the_dense_mask_forward_and_backward(literal, keys, apart, dtype):
    torch.set_float32_matmul_precision("highest")
    seq, pattern = 500, made(literal, keys)
    segments = torch.tensor([documents(seq)[0], documents(30, 330, 140)[0]], device="cuda")
    tokens = torch.zeros_like(segments)
    mask = attention_mask(tokens, segments if apart else None, dtype=dtype, head_dim=32, sparse=pattern)
    assert not isinstance(mask, torch.Tensor)
    q, k, v = (torch.randn(2, 4, seq, 32, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    ours = attention(q, k, v, causal=True, mask=mask)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dense = attention(*exact, causal=True, mask=pattern_mask(pattern, segments if apart else tokens))
    bound = 0.02 if dtype == torch.bfloat16 else 5e-4
    assert (ours - dense).abs().max() < bound * dense.abs().max()
    grad = torch.randn_like(ours)
    theirs = torch.autograd.grad(dense, exact, grad.double())
    for got, wanted in zip(torch.autograd.grad(ours, (q, k, v), grad), theirs, strict=True):
        assert (got - wanted).abs().max() < bound * wanted.abs().max()
