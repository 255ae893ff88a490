"""Random numbers that are computed from a seed and an index, so that a part of a tensor is drawn without the rest.

The generator is Philox4x32 with 7 rounds ("Parallel random numbers: as easy as 1, 2, 3", Salmon et al., 2011; 7 is the
least number of rounds that passes their tests). Its counter is (index of the column / 4, index of the row), where rows
are all dimensions but the last; the four words that it gives belong to four neighbouring columns.

Values are made of the words by additions, products and square roots of float32, which IEEE 754 rounds in one way only.
So they are the same on every device, bit by bit, and a C function (`kernels/random_rows.py`) computes the same on CPUs,
30 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.kernels.random_rows import rows_function

ROUNDS = 7
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# The polynomials of logf, sinf and cosf of Cephes (Moshier, 1992), the highest power first.
_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
_LOG += (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_SQRT_HALF = 0x3F3504F3  # bits of the square root of 1/2
# Elements that are drawn at a time: few enough for a CPU's cache, and many enough to occupy a GPU.
_CHUNK = 2**16
_CHUNK_OF_ACCELERATORS = 2**24

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Sequence[torch.Tensor], key: int, rounds: int = ROUNDS) -> Words:
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
        out: the part, which is filled. `view` must be able to flatten all its dimensions but the last.
        std: standard deviation. The mean is 0.
        seed: seed of the whole tensor, of 64 bits.
        start: index of the part's first element in the whole tensor, one number for each dimension.
        shape: shape of the whole tensor.
    """
    _fill(out, _normal_values, std, seed, start, shape)


def fill_uniform(out: torch.Tensor, bound: float, seed: int, start: Sequence[int], shape: Sequence[int]) -> None:
    """Fills a part of a tensor with values of a uniform distribution on (-bound, bound). See `fill_normal`."""
    _fill(out, _uniform_values, bound, seed, start, shape)


def _normal_values(words: Words, std: float) -> list[torch.Tensor]:
    found = []
    for bits, turn in (words[:2], words[2:]):
        # Square roots of float32 are not rounded correctly on all devices; in float64, they are close enough to round.
        radius = _log(_fraction(bits)).mul_(-2.0).double().sqrt_().float().mul_(std)
        cosine, sine = _cosine_and_sine(_fraction(turn))
        found += [cosine.mul_(radius), sine.mul_(radius)]
    return found


def _uniform_values(words: Words, bound: float) -> list[torch.Tensor]:
    return [_fraction(one).mul_(2 * bound).sub_(bound) for one in words]


def _fraction(bits: torch.Tensor) -> torch.Tensor:
    """Returns numbers in (0, 1] of the upper 24 bits, in float32."""
    return (bits >> 8).to(torch.float32).add_(0.5).mul_(2.0**-24)


def _log(x: torch.Tensor) -> torch.Tensor:
    """Returns the natural logarithm of positive float32, by the polynomial of Cephes, to within 1.5 ulp."""
    bits = x.view(torch.int32) - _SQRT_HALF
    exponent = (bits >> 23).to(torch.float32)
    f = ((bits & 0x7FFFFF) + _SQRT_HALF).view(torch.float32) - 1.0  # of the mantissa, in [sqrt(1/2), sqrt(2))
    z = f * f
    y = _polynomial(f, _LOG).mul_(f).mul_(z)
    y.add_(exponent * -2.12194440e-4).sub_(z * 0.5)
    return (f + y).add_(exponent * 0.693359375)


def _cosine_and_sine(turn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosine and the sine of parts of a turn in [0, 1], in float32, by the polynomials of Cephes."""
    turn = turn * 4.0
    number = (turn + 0.5).to(torch.int32)  # of the nearest axis
    x = (turn - number).mul_(1.57079637)  # the angle from this axis
    z = x * x
    sine = _polynomial(z, _SINE).mul_(z).mul_(x).add_(x)
    cosine = _polynomial(z, _COSINE).mul_(z).mul_(z).sub_(z * 0.5).add_(1.0)
    odd = (number & 1).bool()
    along, across = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    return along.mul_(1 - (number + 1 & 2)), across.mul_(1 - (number & 2))


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Returns the value of a polynomial, by Horner's method. A product and a sum are rounded one after the other."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[-1])


def _fill(
    out: torch.Tensor,
    values: Callable[[Words, float], list[torch.Tensor]],
    scale: float,
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
    flat = out.view(-1, columns)
    compiled = rows_function(out.numel()) if device.type == "cpu" else None
    if compiled is not None and out.dtype == torch.float32 and out.is_contiguous():
        return compiled(flat, rows, first, seed, values is _normal_values, scale)
    groups = torch.arange(first // 4, (first + columns + 3) // 4, device=device)
    skipped, zero = first % 4, torch.zeros((), dtype=torch.int64, device=device)
    at_once = max(1, (_CHUNK if device.type == "cpu" else _CHUNK_OF_ACCELERATORS) // columns)
    for begin in range(0, len(flat), at_once):
        row, target = rows[begin : begin + at_once], flat[begin : begin + at_once]
        if compiled is not None:
            drawn = torch.empty(target.shape)
            compiled(drawn, row, first, seed, values is _normal_values, scale)
        else:
            words = philox((groups[None], row[:, None] & _WORD, row[:, None] >> 32, zero), seed)
            drawn = torch.stack(values(words, scale), dim=-1).flatten(1)[:, skipped : skipped + columns]
        target.copy_(drawn)
