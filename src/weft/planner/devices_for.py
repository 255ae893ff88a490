"""Finds how many devices train a run in a number of days."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.formatting import counted
from weft.planner.hardware import Hardware
from weft.planner.no_plan import NoPlan
from weft.planner.plan import RunPlans
from weft.planner.search import search

STEPS = 16  # numbers of devices between two powers of two that are tried at most
MOST = 1 << 20  # devices

Find = Callable[[RunConfig, int, Hardware], RunPlans]


@dataclass(frozen=True)
class Enough:
    """The smallest number of devices that is enough.

    Attributes:
        plans: the plans on this number of devices.
            tried: days of the best plan by number of devices, in increasing order; None if no plan fits.
    """

    plans: RunPlans
    tried: dict[int, float | None]


def devices_for(days: float, config: RunConfig, hardware: Hardware, find: Find = search) -> Enough:
    """Returns the smallest number of devices whose best plan trains a run in a number of days.

    Tries powers of two until one is enough, and then numbers of whole nodes between this power and the one before it,
    from small to large: at most `STEPS` numbers at equal distances. Skips powers that would be too few even if all
    FLOPs ran at the peak, and numbers that would be too few even with as many device-days as the better of both powers.

    Args:
        days: days of training, without interruptions; more than 0.
        config: a checked config.
        hardware: the hardware file.
        find: function that returns the plans on a number of devices, or raises UserError if there are none.

    Raises:
        UserError: no number of devices is enough, or the number of steps of the run is not known.
    """
    tries = _Tries(days, config, hardware, find)
    devices = 1
    while devices <= MOST and tries.found is None and not tries.ended:
        if devices >= tries.least:
            tries.attempt(devices)
        devices *= 2
    if tries.found is None:
        raise tries.not_enough()
    upper = devices // 2
    known = [taken * count for count, taken in tries.days.items() if taken is not None and count >= upper // 2]
    for count in _between(upper // 2, upper, hardware.node):
        if count * days >= min(known) and tries.attempt(count):
            break
    return Enough(tries.found, dict(sorted(tries.days.items())))


class _Tries:
    """The numbers of devices that were tried.

    Attributes:
        days: days by number of devices; None if no plan fits.
        found: the plans on the last number that was enough.
        least: smaller numbers of devices than this are not enough.
        ended: whether more devices have no work.
    """

    def __init__(self, wanted: float, config: RunConfig, hardware: Hardware, find: Find):
        self.wanted, self.config, self.hardware, self.find = wanted, config, hardware, find
        self.days: dict[int, float | None] = {}
        self.found: RunPlans | None = None
        self.least, self.ended = 0.0, False
        self.error: UserError | None = None

    def attempt(self, devices: int) -> bool:
        """Plans for a number of devices. Returns whether it is enough."""
        self.days[devices] = None
        try:
            plans = self.find(self.config, devices, self.hardware)
        except NoPlan as error:
            self.error, self.ended = self.error if error.ends else error, error.ends
            return False
        best = plans.best[0]
        costs = best.costs()
        if not costs:
            raise UserError("the length of the run is not known; set training.tokens or training.steps")
        taken = self.days[devices] = costs["days"]
        # A model FLOPs utilization above 1 is possible, since causal attention has half of the FLOPs that it counts.
        self.least = max(self.least, taken * devices * best.prediction.mfu / 2 / self.wanted)
        if taken > self.wanted:
            return False
        self.found = plans
        return True

    def not_enough(self) -> UserError:
        """Returns the error for a run that no number of devices trains in time."""
        known = [(taken, devices) for devices, taken in self.days.items() if taken is not None]
        if not known:
            return self.error or UserError(f"no plan on {MOST:,} devices or fewer; use a larger device")
        if self.least > MOST:
            return UserError(
                f"no number of devices trains the run in {self.wanted:g} days: even at their peak it needs more than "
                f"{MOST:,}; allow more days, or train a smaller model"
            )
        taken, devices = min(known)
        return UserError(
            f"no number of devices trains the run in {self.wanted:g} days; the shortest of those tried is "
            f"{taken:,.4g} days on {counted(devices, 'device')}; raise training.batch_tokens, allow more days, or "
            "train a smaller model"
        )


def _between(low: int, high: int, node: int) -> range:
    """Returns the numbers between two powers of two that are tried: whole nodes, and within a node none."""
    if low < node or (nodes := (high - low) // node) < 2:
        return range(0)
    step = node * -(-nodes // STEPS)
    return range(low + step, high, step)
