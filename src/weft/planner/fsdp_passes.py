"""The passes of a stage for one micro-batch on a timeline, with FSDP2's collectives beside them."""

from __future__ import annotations

from weft.planner.timeline import Timeline
from weft.planner.units import Job, Stage, Unit


class FsdpPasses:
    """The passes of a stage for one micro-batch, with the collectives of its parameters.

    Args:
        line: the streams of the rank.
        first, last: whether the micro-batch is the first or the last of the step.
    """

    def __init__(self, job: Job, stage: Stage, line: Timeline, *, first: bool, last: bool):
        self.stage, self.line, self.blocks = stage, line, job.blocks
        reshards = bool(job.parallel.reshards)
        self.first, self.gathers, self.gathers_again = first, first or reshards, reshards
        self.reduces = last or job.parallel.reduces_every
        self.ahead = max(1, job.parallel.prefetch)
        self.split = False

    def forward(self) -> None:
        """Adds the forward pass."""
        line, pieces, arrived = self.line, self.stage.pieces, {}

        def gather(place: int, ready: float) -> None:
            if self.gathers and place < len(pieces) and place not in arrived:
                arrived[place] = self._communicate("dp_shard", pieces[place].gather, ready, "all-gather")

        if self.gathers:
            line.wait(self._communicate("dp_shard", self.stage.root.gather, line.now, "all-gather"), "dp_shard")
            line.serial("dp_shard", self.stage.root.around, "copy")
        gather(0, line.now)
        for place, unit in enumerate(pieces):
            if place in arrived:
                line.wait(arrived[place], "dp_shard")
                line.serial("dp_shard", unit.around, "copy")
            for next_place in range(place + 1, place + 1 + self.ahead):
                gather(next_place, line.now)
            self._pass(unit, "forward")

    def backward(self) -> None:
        """Adds the backward pass, and the reduction of gradients if it belongs to this micro-batch."""
        line, pieces, arrived = self.line, self.stage.pieces, {}
        begin = int(self.stage.first is not None)
        end = begin + len(self.stage.units) - 1

        def gather(place: int) -> None:
            # The last unit and the head are not resharded after forward; the embedding needs no weight in backward.
            if self.gathers_again and begin <= place < end and place not in arrived:
                arrived[place] = self._communicate("dp_shard", pieces[place].gather_again, line.now, "all-gather")

        for place in reversed(range(len(pieces))):
            gather(place)
            if place in arrived:
                line.wait(arrived[place], "dp_shard")
                line.serial("dp_shard", pieces[place].around, "copy")
            for next_place in range(place - 1, place - 1 - self.ahead, -1):
                gather(next_place)
            self._pass(pieces[place], "backward")
            self._reduce(pieces[place])
        self._reduce(self.stage.root)

    def _reduce(self, unit: Unit) -> None:
        if not unit.parameters:
            return
        if not self.first:
            self.line.compute("compute", unit.accumulate, "accumulate")
        if self.reduces:
            self.line.serial("dp_shard", unit.around, "copy")
            ready = self._communicate("dp_shard", unit.reduce, self.line.now, "reduce-scatter")
            self._communicate("dp_replicate", unit.replicate, ready, "all-reduce")

    def _communicate(self, axis: str, seconds: float, ready: float, name: str) -> float:
        """Adds a collective, and waits for it if nothing can run beside it. Returns when it ends."""
        if not self.blocks:
            return self.line.communicate(axis, seconds, ready, name)
        self.line.serial(axis, seconds, name)
        return self.line.now

    def _pass(self, unit: Unit, direction: str) -> None:
        waits = unit.forward if direction == "forward" else unit.backward
        if direction == "forward":
            self.line.compute("compute", unit.passes.forward, "forward")
        else:
            self.line.compute("recompute", unit.passes.recompute, "recompute")
            self.line.compute("compute", unit.passes.backward, "backward")
        for axis, seconds in waits.items():
            self.line.serial(axis, seconds, axis)
