"""Fits scaling laws to losses of runs, in the three ways of Hoffmann et al. (2022, "Chinchilla").

Each way gives the model with the smallest loss for a number of FLOPs C, as powers of C: parameters N = k C^a and tokens
D = C / (6 N). The third way gives the law L(N, D) = E + A / N^alpha + B / D^beta, for which a = beta / (alpha + beta).
The published third fit stopped before its minimum and had intervals that were too narrow (Besiroglu et al., 2024): here
the loss is a sum, the tolerances are tight, and intervals come from resampled runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from weft.errors import UserError
from weft.planner.budget import ParametricLaw

FLOPS = 6.0  # of a parameter and a token, forward and backward
HUBER = 1e-3  # residuals of log losses above this count linearly, as in the paper
# Starts of the search for the law: logarithms of the terms E, A / N^alpha and B / D^beta at the geometric mean of all N
# and D, relative to that of the losses; and the exponents.
STARTS = ((-2.0, -1.0, -0.5, -0.1), (-4.0, -2.0, -0.7), (-4.0, -2.0, -0.7), (0.1, 0.3, 0.6, 1.2), (0.1, 0.3, 0.6, 1.2))
BEST_STARTS = 20  # of the grid, from which the law is searched
SAME_FLOPS = 0.1  # runs whose FLOPs differ by less than this fraction are one budget
BUDGETS = 8  # number of budgets that are interpolated if runs have no common budgets
GRID = 60  # number of FLOPs at which the envelope is read
SCALE = 1e6  # of the error: L-BFGS-B compares changes of the error with at least 1
LEAST_POINTS, LEAST_SIZES = 6, 3
LEAST_SPREAD = 0.1  # standard deviation of log(D / N), without which N and D cannot be told apart
LARGEST_EXPONENT = 3.0
RESAMPLES = 200
KEYS = {"E": "e", "A": "a", "B": "b", "alpha": "alpha", "beta": "beta"}  # keys of the result, and the law's names


@dataclass(frozen=True)
class Observation:
    """The loss of a model.

    Attributes:
        parameters: number of parameters, N.
        tokens: number of training tokens, D.
        loss: loss in nats per token.
    """

    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        """FLOPs of the training, 6 N D."""
        return FLOPS * self.parameters * self.tokens


@dataclass(frozen=True)
class Power:
    """The best number of parameters for C FLOPs, N = coefficient * C^exponent; tokens are C / (6 N)."""

    coefficient: float
    exponent: float

    def parameters(self, flops: float) -> float:
        """Returns the number of parameters of the best model for a number of FLOPs."""
        return self.coefficient * flops**self.exponent


def best_sizes(law: ParametricLaw) -> Power:
    """Returns the number of parameters with the smallest loss of a law, as a power of FLOPs."""
    exponent = law.beta / (law.alpha + law.beta)
    return Power(law.optimum(1.0)[0], exponent)


def check(points: Sequence[Observation]) -> None:
    """Raises UserError if no law can be identified from the points: too few, or N and D do not vary enough."""
    sizes, lengths = len({one.parameters for one in points}), len({one.tokens for one in points})
    if len(points) < LEAST_POINTS or sizes < LEAST_SIZES or lengths < LEAST_SIZES:
        raise UserError(
            f"the law has 5 numbers, but there are {len(points)} losses of {sizes} model sizes and {lengths} numbers "
            f"of tokens; give at least {LEAST_POINTS} losses of {LEAST_SIZES} sizes and {LEAST_SIZES} numbers of tokens"
        )
    spread = float(np.std([math.log(one.tokens / one.parameters) for one in points]))
    if spread < LEAST_SPREAD:
        ratio = np.mean([one.tokens / one.parameters for one in points])
        raise UserError(
            f"all runs have about {ratio:.3g} tokens per parameter, so the effects of size and tokens cannot be told "
            "apart; add runs with other ratios"
        )


def fit_law(points: Sequence[Observation], starts: Sequence[ParametricLaw] = ()) -> ParametricLaw:
    """Fits the law with the smallest sum of Huber losses of log losses, by L-BFGS from several starts.

    Args:
        starts: laws from which the search starts. Default: the best of a grid.

    Raises:
        UserError: scipy is not installed.
    """
    optimize = _scipy()
    n, d, loss = (np.log([getattr(one, name) for one in points]) for name in ("parameters", "tokens", "loss"))
    # Terms at the mean size and tokens, and exponents, are far less correlated than A, B and the exponents.
    mean_n, mean_d, ones = n.mean(), d.mean(), np.ones_like(n)
    n, d = n - mean_n, d - mean_d

    def error(x: np.ndarray) -> tuple[float, np.ndarray]:
        terms = np.stack([x[0] * ones, x[1] - x[3] * n, x[2] - x[4] * d])
        top = terms.max(axis=0)
        shares = np.exp(terms - top)
        total = shares.sum(axis=0)
        shares /= total
        residual = top + np.log(total) - loss
        size, slope = np.abs(residual), np.clip(residual, -HUBER, HUBER)
        value = np.where(size <= HUBER, residual**2 / 2, HUBER * (size - HUBER / 2))
        gradient = [*(shares @ slope), -(shares[1] * n) @ slope, -(shares[2] * d) @ slope]
        return SCALE * float(value.sum()), SCALE * np.array(gradient)

    if starts:
        firsts = [
            np.array([math.log(one.e), math.log(one.a) - one.alpha * mean_n, math.log(one.b) - one.beta * mean_d])
            for one in starts
        ]
        firsts = [np.append(x, [one.alpha, one.beta]) for x, one in zip(firsts, starts, strict=True)]
    else:
        level = np.array([loss.mean()] * 3 + [0.0, 0.0])
        firsts = sorted((np.array(one) + level for one in product(*STARTS)), key=lambda one: error(one)[0])
    options = {"maxiter": 2000, "maxfun": 10_000, "ftol": 1e-13, "gtol": 1e-7}
    found = [
        optimize.minimize(error, one, jac=True, method="L-BFGS-B", options=options) for one in firsts[:BEST_STARTS]
    ]
    e, a, b, alpha, beta = map(float, min(found, key=lambda one: one.fun).x)
    return ParametricLaw(math.exp(e), math.exp(a + alpha * mean_n), math.exp(b + beta * mean_d), alpha, beta)


def fit_isoflop(points: Sequence[Observation]) -> Power | None:
    """Fits a parabola of the loss over log N to each budget of FLOPs, and a power law to their minima.

    Returns None if fewer than two budgets have a minimum between their smallest and largest model.
    """
    minima = []
    for flops, rows in budgets(points):
        x, y = np.log([one.parameters for one in rows]), np.array([one.loss for one in rows])
        c, b, _ = np.polyfit(x, y, 2)
        if c > 0 and x.min() < (best := -b / (2 * c)) < x.max():
            minima.append((math.log(flops), best))
    return _power(minima)


def budgets(points: Sequence[Observation]) -> list[tuple[float, list[Observation]]]:
    """Returns budgets of FLOPs, each with runs of at least three sizes; interpolated if runs have no common budgets."""
    rows: list[list[Observation]] = []
    for one in sorted(points, key=lambda one: one.flops):
        if rows and one.flops <= rows[-1][0].flops * (1 + SAME_FLOPS):
            rows[-1].append(one)
        else:
            rows.append([one])
    full = [group for group in rows if len({one.parameters for one in group}) >= LEAST_SIZES]
    if len(full) >= 2:
        return [(math.exp(np.mean([math.log(one.flops) for one in group])), group) for group in full]
    found = []
    low, high = min(one.flops for one in points), max(one.flops for one in points)
    for flops in np.geomspace(low, high, BUDGETS + 2)[1:-1]:
        between = interpolated(points, float(flops))
        if len(between) >= LEAST_SIZES:
            found.append((float(flops), between))
    return found


def interpolated(points: Sequence[Observation], flops: float) -> list[Observation]:
    """Returns the loss of each model size at a number of FLOPs, between two of its losses, on logarithmic axes."""
    found = []
    for size in sorted({one.parameters for one in points}):
        rows = sorted((one for one in points if one.parameters == size), key=lambda one: one.tokens)
        tokens = flops / (FLOPS * size)
        if len(rows) > 1 and rows[0].tokens <= tokens <= rows[-1].tokens:
            x, y = (np.log([getattr(one, name) for one in rows]) for name in ("tokens", "loss"))
            found.append(Observation(size, tokens, math.exp(np.interp(math.log(tokens), x, y))))
    return found


def fit_envelope(points: Sequence[Observation]) -> Power | None:
    """Fits a power law to the size with the smallest loss at each of many numbers of FLOPs.

    The smallest and the largest size do not count as best, because others could be better. Returns None if fewer than
    two sizes are best somewhere.
    """
    low, high = min(one.flops for one in points), max(one.flops for one in points)
    best = []
    for flops in np.geomspace(low, high, GRID):
        rows = interpolated(points, float(flops))
        if len(rows) >= LEAST_SIZES:
            winner = min(rows, key=lambda one: one.loss).parameters
            if rows[0].parameters < winner < rows[-1].parameters:
                best.append((math.log(flops), math.log(winner)))
    return _power(best) if len({size for _, size in best}) > 1 else None


def _power(rows: Sequence[tuple[float, float]]) -> Power | None:
    """Returns the power law through (log C, log N); None with fewer than two rows."""
    if len({x for x, _ in rows}) < 2:
        return None
    slope, start = np.polyfit([x for x, _ in rows], [y for _, y in rows], 1)
    return Power(math.exp(start), float(slope))


def fit_all(points: Sequence[Observation], seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Fits the law and the best sizes in three ways, with intervals. The result is plain data for JSON.

    Args:
        points: the losses.
        seed: seed of the resampling.
        resamples: number of resampled sets of points, from which the intervals follow.

    Returns:
        `parametric`: E, A, B, alpha and beta, each with `value` and `interval`. `optimum`: for each way, `coefficient`
        and `exponent` of N = coefficient * C^exponent, each with `value` and `interval`; None if the points do not
        identify it. An interval has 95% of the results of resampled points; None if more than half of them failed.

    Raises:
        UserError: the points cannot identify the law.
    """
    check(points)
    law = fit_law(points)
    for name in ("alpha", "beta"):
        if not 0.01 < (value := getattr(law, name)) < LARGEST_EXPONENT:
            what = "size" if name == "alpha" else "tokens"
            raise UserError(
                f"the fit has {name} {value:.3g}, so the losses do not show how they fall with {what}; add runs with a "
                f"wider range of {what}"
            )
    ways: dict[str, Callable[[Sequence[Observation]], Power | None]] = {
        "envelope": fit_envelope,
        "isoflop": fit_isoflop,
    }
    chooser = np.random.default_rng(seed)
    samples = [[points[i] for i in chooser.integers(len(points), size=len(points))] for _ in range(resamples)]
    laws = [fit_law(sample, [law]) for sample in samples if len({one.parameters for one in sample}) > 1]
    values: dict[str, Any] = {
        key: _number(getattr(law, name), [getattr(one, name) for one in laws], resamples) for key, name in KEYS.items()
    }
    good = [best_sizes(one) for one in laws if one.alpha > 0 and one.beta > 0]
    optimum: dict[str, Any] = {"parametric": _optimum(best_sizes(law), good, resamples)}
    for name, way in ways.items():
        power = way(points)
        found = [one for sample in samples if (one := way(sample)) is not None] if power is not None else []
        optimum[name] = power and _optimum(power, found, resamples)
    return {
        "format": 1,
        "points": len(points),
        "parameters": [min(one.parameters for one in points), max(one.parameters for one in points)],
        "tokens": [min(one.tokens for one in points), max(one.tokens for one in points)],
        "flops": [min(one.flops for one in points), max(one.flops for one in points)],
        "parametric": values,
        "optimum": optimum,
    }


def _optimum(power: Power, found: Sequence[Power], resamples: int) -> dict[str, Any]:
    names = ("coefficient", "exponent")
    return {name: _number(getattr(power, name), [getattr(one, name) for one in found], resamples) for name in names}


def _number(value: float, found: Sequence[float], resamples: int) -> dict[str, Any]:
    enough = len(found) > resamples / 2
    interval = [float(one) for one in np.percentile(found, [2.5, 97.5])] if enough else None
    return {"value": value, "interval": interval}


def _scipy() -> Any:
    try:
        from scipy import optimize
    except ImportError:
        raise UserError("fitting scaling laws needs scipy; install it: pip install 'weft-train[scaling]'") from None
    return optimize
