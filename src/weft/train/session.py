"""Defines `Session`, the steps of a run that the user's own loop makes by calling `Trainer.step`."""

from __future__ import annotations

import math
import signal
import sys
import weakref
from contextlib import ExitStack
from typing import Any

from weft.observe.logs import stop_log
from weft.observe.status import doing
from weft.parallel.mesh_view import Mesh
from weft.parallel.ranks import broadcast_object
from weft.processes import signal_handler
from weft.train.build import Built
from weft.train.given_batches import GivenBatches
from weft.train.loop import Loop
from weft.train.stop import Outcome, StopRequest


class Session:
    """The steps of a run that the user's own loop makes.

    While it is open, it handles SIGTERM, which sets `stopping`. During a step it also handles SIGINT, so that Ctrl-C
    does not interrupt an update.

    Args:
        loop: the training loop, of which `step` makes one step.

    Attributes:
        decision: what all ranks decided in the last step (see `StopRequest.decide`); None: the run goes on.
    """

    def __init__(self, built: Built, loop: Loop, mesh: Mesh):
        self.built, self.loop, self.mesh = built, loop, mesh
        self.stop, self.decision = StopRequest(), None
        self._updates = False
        self._handlers = ExitStack()
        self._handlers.enter_context(signal_handler(self.stop.receive, signal.SIGTERM, signal.SIGHUP))
        loop.begin(built.step, self.stop)
        self._unclosed = weakref.finalize(self, end_unclosed, loop, self._handlers)

    @property
    def can_save(self) -> bool:
        """Whether all ranks are between the same two steps, although this rank was interrupted."""
        return self.decision == signal.SIGINT or (self.loop.world.ranks == 1 and not self._updates)

    def step(self, batch: Any) -> dict[str, float]:
        """Makes one step and returns its metrics, the same on all ranks (see `Trainer.step`)."""
        with signal_handler(self.stop.receive, signal.SIGINT):
            self.decision = self._step(batch)
        doing("the program between two steps", "program", math.inf)
        if self.decision == signal.SIGINT:
            self.stop.received = None
            raise KeyboardInterrupt
        metrics = self.loop.state.metrics.items()
        return broadcast_object({name: float(value) for name, value in metrics if isinstance(value, int | float)})

    def _step(self, given: Any) -> int | None:
        """Makes one step and returns `decision`. If that is SIGINT, the update may not have been made."""
        loop, source, step = self.loop, self.built.data.source, self.loop.state.step
        assert isinstance(source, GivenBatches)
        doing(f"step {step + 1:,}", step=step + 1)
        loop.recorder.begin_step()
        batch = source.batch(given, step)
        loop.recorder.data_arrived()
        sums, decision = loop.sum_batch(batch)
        if decision == signal.SIGINT:
            return decision
        self._updates = True
        loop.update(batch, sums)
        loop.after_update(step + 1)
        self._updates = False
        if loop.world.ranks == 1 or loop.callbacks.found:  # otherwise, the next step counts the votes
            decision = self.stop.decide(loop.world.sum(votes=self.stop.votes))
        return decision

    def close(self) -> Outcome:
        """Saves the last step if it is not saved, and ends the session. All ranks must call it."""
        loop, steps, reason = self.loop, self.loop.length.steps, None
        number = self.decision or None
        if self.decision == StopRequest.BY_CALLBACK:
            status, reason = "stopped-early", loop.stop_reason()
        else:
            ends_early = number is not None or (steps is not None and loop.state.step < steps)
            status = "stopped" if ends_early else "finished"
        with self.built.cleanup, self._handlers:
            self._unclosed.detach()
            try:
                outcome = loop.leave(status, signal=number, reason=reason)
            finally:
                loop.recorder.close()
            loop.recorder.ended(outcome.status, outcome.step, outcome.reason)
            loop.world.close()
        stop_log()
        return outcome

    def abandon(self) -> None:
        """Ends the session after an exception, on this rank alone. Nothing is saved."""
        with self.built.cleanup, self._handlers:
            self._unclosed.detach()
            self.loop.saver.abandon()
            self.loop.recorder.close()


def end_unclosed(loop: Loop, handlers: ExitStack) -> None:
    """Closes the files of a session that the program did not close, at its end. Writes the report, unless it failed."""
    handlers.close()
    loop.recorder.close()
    if getattr(sys, "last_value", None) is None:
        loop.recorder.ended("finished", loop.state.step)
    loop.job.__exit__(None, getattr(sys, "last_value", None), None)
