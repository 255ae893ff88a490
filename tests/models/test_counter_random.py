"""Random numbers by index: the published vectors of Philox, and parts of a tensor that equal the whole."""

import itertools
import math

import pytest
import torch

from weft.kernels import random_rows
from weft.models.counter_random import fill_normal, fill_uniform, philox

ONES = 0xFFFFFFFF


# From the file of known answers of Random123, the authors' library: counter, key and words of 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES, ONES], [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_generator_gives_the_published_words(counter, key, words):
    found = philox(tuple(torch.tensor([one]) for one in counter), key[0] | key[1] << 32, rounds=10)
    assert [word.item() for word in found] == words


def whole(shape, fill=fill_normal, seed=7, scale=1.0):
    out = torch.empty(shape)
    fill(out, scale, seed, [0] * len(shape), shape)
    return out


@pytest.mark.parametrize("shape", [(13,), (5, 11), (3, 7, 10), (2, 3, 4, 5)])
@pytest.mark.parametrize("fill", [fill_normal, fill_uniform])
def test_every_part_equals_that_of_the_whole(shape, fill):
    full = whole(shape, fill)
    ranges = [[(0, size), (1, size), (size // 2, size // 2 + 1), (0, 0)] for size in shape]
    for places in itertools.product(*ranges):
        part = torch.empty([end - begin for begin, end in places])
        fill(part, 1.0, 7, [begin for begin, _ in places], shape)
        assert torch.equal(part, full[tuple(slice(*place) for place in places)])


@pytest.mark.parametrize("fill", [fill_normal, fill_uniform])
@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [
        ((700, 1100), (0, 0), (700, 1100)),  # several blocks of columns
        ((40, 30, 1037), (2, 1, 3), (20, 20, 1001)),
        ((2**41, 5), (2**40, 1), (9, 3)),  # rows of more than 32 bits
        ((300001,), (17,), (299980,)),
    ],
)
def test_the_compiled_function_gives_the_same_bits(monkeypatch, fill, shape, start, size):
    assert random_rows.load_library("random_rows", *random_rows.FLAGS) is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found = []
        for small in (0, math.inf):  # always, and never
            monkeypatch.setattr(random_rows, "SMALL", small)
            found.append(torch.empty(size, dtype=dtype))
            fill(found[-1], 0.7, 2**63 + 12345, start, shape)
        assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small", [0, math.inf])  # with the compiled function, and without
def test_a_slice_is_filled_and_nothing_beside_it(monkeypatch, small, dtype):
    monkeypatch.setattr(random_rows, "SMALL", small)
    full = whole((200, 400)).to(dtype)
    for part in ((slice(None), slice(200)), (slice(None, None, 3), slice(7, 399))):
        weight = torch.full((200, 400), 5.0, dtype=dtype)
        rows = len(weight[part])
        fill_normal(weight[part], 1.0, 7, [0, part[1].start or 0], (200, 400))
        assert torch.equal(weight[part], full[:rows, part[1]])
        weight[part] = 5.0
        assert (weight == 5.0).all()
    deep = torch.zeros(20, 20, 400, dtype=dtype)
    fill_normal(deep[:, :, :200], 1.0, 7, [0, 0, 0], (20, 20, 400))
    assert torch.equal(deep[:, :, :200].flatten(0, 1), whole((400, 400)).to(dtype)[:, :200])
    assert not deep[:, :, 200:].any()
    with pytest.raises(RuntimeError, match="view"):  # rows in two strides
        fill_normal(deep[:, :10], 1.0, 7, [0, 0, 0], (20, 20, 400))


def test_values_are_those_of_the_formula_in_float64():
    words = philox((torch.arange(200_000), *torch.zeros(3, 1, dtype=torch.int64)), 7)
    first, second, third, fourth = ((((word >> 8).float() + 0.5) * 2.0**-24).double() for word in words)
    expected = []
    for bits, turn in ((first, second), (third, fourth)):
        radius, angle = (-2 * bits.log()).sqrt(), 2 * math.pi * turn
        expected += [radius * angle.cos(), radius * angle.sin()]
    assert (whole((800_000,)).double() - torch.stack(expected, dim=-1).flatten()).abs().max() < 1e-6


def test_normal_values_have_the_moments_of_the_distribution_and_no_repetition():
    values = whole((1500, 700), scale=0.5).double()  # 1.05 million values, in several pieces
    count = values.numel()
    assert abs(values.mean()) < 4 * 0.5 / math.sqrt(count)
    assert abs(values.var() / 0.25 - 1) < 4 * math.sqrt(2 / count)
    assert abs((values / 0.5).pow(4).mean() / 3 - 1) < 4 * math.sqrt(96 / count) / 3
    # Kolmogorov and Smirnov's distance from the distribution's own function; 1.95 is exceeded once in a thousand times.
    ordered = torch.special.ndtr(values.flatten().sort().values / 0.5)
    assert (ordered - torch.arange(count) / count).abs().max() * math.sqrt(count) < 1.95
    for step in (1, 2, 4, 700):  # neighbours, words of a counter, counters and rows are independent
        flat = values.flatten() / 0.5
        assert abs((flat[:-step] * flat[step:]).mean()) < 4 / math.sqrt(count)
    assert len(values.float().flatten().unique()) > 0.95 * count


def test_uniform_values_fill_their_range_evenly():
    values = whole((300, 1001), fill_uniform, scale=0.25)
    assert values.abs().max() <= 0.25
    assert values.abs().max() > 0.2499
    counts = torch.histc(values, 100, -0.25, 0.25)
    expected = values.numel() / 100
    assert ((counts - expected) ** 2 / expected).sum() < 149  # chi-squared of 99 degrees: exceeded once in a thousand


def test_seeds_give_other_values_and_narrow_types_are_rounded():
    assert not torch.equal(whole((4, 8)), whole((4, 8), seed=8))
    assert not torch.equal(whole((4, 8)), whole((4, 8), seed=7 | 1 << 40))
    narrow = torch.empty(4, 8, dtype=torch.bfloat16)
    fill_normal(narrow, 1.0, 7, [0, 0], (4, 8))
    assert torch.equal(narrow, whole((4, 8)).bfloat16())
