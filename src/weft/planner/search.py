"""Finds the fastest plans of a run that fit the memory of its devices.

The search expands candidates in the order of lower bounds of their time (branch and bound; Land and Doig, 1960), first
without and then with their data axes and schedules. It ends when no candidate can be faster than the plans found, so
its result is that of an exhaustive search. Only if this takes more than `EXACT` simulated passes, it also skips
candidates that are probably slower, by the ratio of the predictions so far and their bounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from statistics import median

from weft.config.legal_mesh import is_legal
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.formatting import counted
from weft.planner.bounds import Bounds
from weft.planner.candidates import Candidate, Layout, MeshSpace
from weft.planner.hardware import Hardware
from weft.planner.no_plan import NoPlan, nothing_fits, too_many_devices
from weft.planner.plan import RunPlan, RunPlans, capacity, memory_on, plan_of
from weft.planner.step import predict

NEAR = 1.25  # times the device's memory that a plan may need to be shown as a near miss
MISSES = 3  # near misses that are shown
EXACT = 250_000  # simulated passes after which candidates are also skipped by estimates of their time
MOST = 600_000  # simulated passes of a search
TRIED = 24  # candidates whose memory is computed to find the nearest


def search(config: RunConfig, devices: int, hardware: Hardware, *, limit: int = 5) -> RunPlans:
    """Returns the fastest plans that fit.

    Args:
        config: a checked config. Its section `parallel` is replaced, except keys that change the result of the run, and
            keys that are given beside `parallel.auto`.
        devices: number of ranks.
        hardware: the hardware file.
        limit: number of plans, of different meshes.

    Raises:
        NoPlan: no plan fits, or there are more devices than layers and batch allow.
        UserError: the run cannot be predicted.
    """
    if not isinstance(config.model, ModelSection) or config.model.vocab_size is None:
        plan_of(config, devices, hardware)  # raises
    found = MeshSearch(MeshSpace(config, devices, hardware), hardware, limit)
    found.run()
    if not found.best and devices > hardware.node:
        found = MeshSearch(MeshSpace(config, devices, hardware, within=False), hardware, limit)
        found.run()
    if not found.best and not found.considered:
        if given := found.space.given:
            keys = ", ".join(f"{key}: {value}" for key, value in given.items())
            raise NoPlan(f"no mesh of {counted(devices, 'device')} has {keys}; change or remove a key")
        raise too_many_devices(config, devices, hardware)
    plans = found.result()
    if not plans.best:
        raise nothing_fits(plans.near, hardware)
    return plans


class MeshSearch:
    """A search for the fastest plans.

    Args:
        space: the candidates.
        hardware: the hardware file.
        limit: number of plans.

    Attributes:
        best: the fastest plan of each mesh.
        worst: seconds of the slowest plan that would still be returned.
        considered: number of candidates with a computed bound.
        predicted: number of candidates whose time was predicted.
    """

    def __init__(self, space: MeshSpace, hardware: Hardware, limit: int):
        self.space, self.hardware, self.limit = space, hardware, limit
        self.bounds, self.capacity = Bounds(space, hardware, cpu=hardware.device.kind == "cpu"), capacity(hardware)
        self.host = hardware.host.memory_gb * 1e9
        self.best: dict[tuple[int, ...], RunPlan] = {}
        self.misses: dict[tuple[int, ...], tuple[float, Candidate]] = {}
        self.close: dict[tuple[int, ...], tuple[float, Candidate]] = {}
        self.ratios: list[float] = []
        self.predicted = self.considered = self.passes = 0
        self.worst = float("inf")

    def run(self) -> None:
        """Expands candidates until no other can be faster than the plans found."""
        order = count()
        heap: list[tuple[float, int, bool, Layout | Candidate]] = []
        for layout in self.space.layouts():
            heap.append((self.bounds.layout_seconds(layout), next(order), False, layout))
        heapq.heapify(heap)
        while heap and heap[0][0] * self.ratio < self.worst and self.passes < MOST:
            bound, _, tight, taken = heapq.heappop(heap)
            if isinstance(taken, Layout):
                for seconds, candidate in self._expand(taken):
                    heapq.heappush(heap, (seconds, next(order), candidate.layout.pp == 1, candidate))
            elif bound * self.ratio >= self._seconds_of(taken):
                continue
            elif tight:
                self._predict(taken)
            else:
                heapq.heappush(heap, (max(bound, self.bounds.tight_seconds(taken)), next(order), True, taken))

    @property
    def ratio(self) -> float:
        """The factor by which bounds are multiplied: 1, and after `EXACT` passes an estimate from these."""
        return 1.0 if self.passes < EXACT else 0.97 * median(self.ratios)

    def _expand(self, layout: Layout) -> Iterator[tuple[float, Candidate]]:
        """Yields the candidates of a layout that may fit, and their bounds."""
        for schedule, virtual in self.space.schedules_of(layout):
            first = True
            for candidate in self.space.variants(layout, schedule, virtual):
                self.considered += 1
                needed = self.bounds.memory(candidate)
                if needed > self.capacity or self.bounds.host_memory(candidate) > self.host:
                    self._miss(needed, candidate)
                    if first and candidate.offload == "parameters" and self._never(candidate):
                        break
                    continue
                first = False
                seconds = self.bounds.seconds(candidate)
                if seconds < min(self.worst, self._seconds_of(candidate)):
                    yield seconds, candidate

    def _never(self, candidate: Candidate) -> bool:
        """Whether activations alone, which do not depend on the data axes, exceed the device's memory."""
        return self.bounds.kept(candidate)[0] > self.capacity

    def _miss(self, needed: float, candidate: Candidate) -> None:
        """Records a candidate that does not fit, if no other of its mesh needs less."""
        mesh = candidate.key
        if mesh not in self.misses or needed < self.misses[mesh][0]:
            self.misses[mesh] = (needed, candidate)

    def _seconds_of(self, candidate: Candidate) -> float:
        """Returns the seconds of the best plan with the mesh of a candidate."""
        plan = self.best.get(candidate.key)
        return float("inf") if plan is None else plan.prediction.step_seconds

    def _predict(self, candidate: Candidate) -> None:
        config = self.space.config_of(candidate, self.bounds.stage_layers(candidate))
        if not is_legal(config, self.space.devices):
            return
        devices = self.space.devices
        # The first pipeline rank often needs most, and rules most candidates out.
        for only in (0, None) if candidate.layout.pp > 1 else (None,):
            ranks = memory_on(config, devices, self.hardware, only=only)
            needed = max(one.total for one in ranks)
            if needed > self.capacity:
                self._miss(needed, candidate)
                if needed < min(NEAR * self.capacity, self.close.get(candidate.key, (needed + 1,))[0]):
                    self.close[candidate.key] = needed, candidate
                return
        self.predicted += 1
        layout = candidate.layout
        self.passes += 4 * layout.count * layout.pp * candidate.virtual if layout.pp > 1 else 500
        step = predict(config, devices, self.hardware)
        bound = self.bounds.seconds(candidate) if candidate.layout.pp == 1 else self.bounds.tight_seconds(candidate)
        self.ratios.append(step.step_seconds / bound)
        if step.step_seconds < self._seconds_of(candidate):
            self.best[candidate.key] = RunPlan(config, devices, self.hardware, step, ranks)
            if len(self.best) >= self.limit:
                every = sorted(plan.prediction.step_seconds for plan in self.best.values())
                self.worst = every[self.limit - 1]

    def result(self) -> RunPlans:
        """Returns the plans found."""
        best = sorted(self.best.values(), key=lambda plan: plan.prediction.step_seconds)
        fastest = best[0].prediction.step_seconds if best else float("inf")
        exact = self.passes < EXACT
        return RunPlans(best[: self.limit], self.near(fastest), self.predicted, self.considered, exact)

    def near(self, fastest: float) -> list[RunPlan]:
        """Returns plans that do not fit and would be faster; without plans that fit, those that need least.

        Args:
            fastest: seconds of the fastest plan that fits.
        """
        known = self.close if self.best else self.misses
        nearest = sorted(known.values(), key=lambda one: one[0])
        plans: list[RunPlan] = []
        for _, candidate in nearest[:TRIED]:
            config = self.space.config_of(candidate, self.bounds.stage_layers(candidate))
            if self.bounds.seconds(candidate) >= fastest or not is_legal(config, self.space.devices):
                continue
            plan = plan_of(config, self.space.devices, self.hardware)
            plans += [plan] if plan.prediction.step_seconds < fastest else []
            if len(plans) == MISSES:
                break
        return sorted(plans, key=lambda plan: plan.excess)
