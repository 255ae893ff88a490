"""Random numbers that are computed from a seed and an index, so that a part of a tensor is drawn without the rest.

The generator is Philox4x32 with 7 rounds ("Parallel random numbers: as easy as 1, 2, 3", Salmon et al., 2011; 7 is the
least number of rounds that passes their tests). Its counter is (index of the column / 4, index of the row), where rows
are all dimensions but the last; the four words that it gives belong to four neighbouring columns. Bits are the same on
every device; values agree within the rounding of `log`, `cos` and `sin`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

ROUNDS = 7
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Elements that are drawn at a time: few enough for a CPU's cache, and many enough to occupy a GPU.
_CHUNK = {"cpu": 2**16}
_CHUNK_OF_ACCELERATORS = 2**24

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: int, rounds: int = ROUNDS) -> Words:
    """Returns four tensors of 32 random bits (int64, 0 to 2^32 - 1) for each counter.

    Args:
        counter: the four 32-bit words of the counters, as int64 tensors of one shape, or shapes that broadcast.
        key: seed of 64 bits.
        rounds: number of rounds.
    """
    first, second, third, fourth = counter
    keys = [key & _WORD, key >> 32 & _WORD]
    for _ in range(rounds):
        # The product of two 32-bit words wraps around in int64, but its bits are right.
        low, high = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first = ((high >> 32) & _WORD) ^ second ^ keys[0]
        third = ((low >> 32) & _WORD) ^ fourth ^ keys[1]
        second, fourth = high & _WORD, low & _WORD
        keys = [(one + step) & _WORD for one, step in zip(keys, _KEY_STEPS, strict=True)]
    return first, second, third, fourth


def fill_normal(out: torch.Tensor, std: float, seed: int, start: Sequence[int], shape: Sequence[int]) -> None:
    """Fills a part of a tensor with values of a normal distribution (Box and Muller's method, in float32).

    Args:
        out: the part, which is filled.
        std: standard deviation. The mean is 0.
        seed: seed of the whole tensor, of 64 bits.
        start: index of the part's first element in the whole tensor, one number for each dimension.
        shape: shape of the whole tensor.
    """

    def values(words: Words) -> list[torch.Tensor]:
        found = []
        for bits, turn in (words[:2], words[2:]):
            radius = _fraction(bits).log_().mul_(-2.0).sqrt_().mul_(std)
            angle = _fraction(turn).mul_(2 * math.pi)
            found += [radius * angle.cos(), radius * angle.sin()]
        return found

    _fill(out, values, seed, start, shape)


def fill_uniform(out: torch.Tensor, bound: float, seed: int, start: Sequence[int], shape: Sequence[int]) -> None:
    """Fills a part of a tensor with values of a uniform distribution on (-bound, bound). See `fill_normal`."""
    _fill(out, lambda words: [_fraction(one).mul_(2 * bound).sub_(bound) for one in words], seed, start, shape)


def _fraction(bits: torch.Tensor) -> torch.Tensor:
    """Returns numbers in (0, 1] of the upper 24 bits, in float32."""
    return (bits >> 8).to(torch.float32).add_(0.5).mul_(2.0**-24)


def _fill(
    out: torch.Tensor,
    values: Callable[[Words], list[torch.Tensor]],
    seed: int,
    start: Sequence[int],
    shape: Sequence[int],
) -> None:
    """Fills `out` row by row with `values` of four words each."""
    if out.numel() == 0:
        return
    device, columns, first = out.device, out.shape[-1], start[-1]
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for begin, size, whole in zip(start[:-1], out.shape[:-1], shape[:-1], strict=True):
        rows = (rows[:, None] * whole + torch.arange(begin, begin + size, device=device)).reshape(-1)
    groups = torch.arange(first // 4, (first + columns + 3) // 4, device=device)
    skipped, zero = first % 4, torch.zeros((), dtype=torch.int64, device=device)
    flat = out.view(-1, columns)
    at_once = max(1, _CHUNK.get(device.type, _CHUNK_OF_ACCELERATORS) // columns)
    for begin in range(0, len(flat), at_once):
        row = rows[begin : begin + at_once, None]
        words = philox((groups[None], row & _WORD, row >> 32, zero), seed)
        drawn = torch.stack(values(words), dim=-1).flatten(1)
        flat[begin : begin + at_once].copy_(drawn[:, skipped : skipped + columns])
