"""Callbacks and a metric for runs on several ranks."""

import os
import signal


class StopOn:
    """Asks one rank to stop the run before its last step."""

    def __init__(self, *, rank: int):
        self.rank = rank

    def step(self, state):
        if state.rank == self.rank and state.step < state.steps:
            state.request_stop("this rank has had enough")

    def ended(self, state):
        (state.path / f"ended-{state.rank}").write_text(f"{state.step} {state.status}")


class Dies:
    """Kills one rank, once, after a step and before its checkpoint."""

    def __init__(self, *, step: int, rank: int):
        self.at, self.rank = step, rank

    def step(self, state):
        if (state.step, state.rank) == (self.at, self.rank) and not (state.path / "died").exists():
            (state.path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Likely:
    """How likely labels are, and the mean number of the samples."""

    scalars = ("likely", "sample")

    def outputs(self, outputs, batch):
        return {"likely": ((outputs.exp() * batch.weight).sum(), batch.weight.sum())}

    def step(self, state):
        samples = state.batch.samples
        return {"sample": (samples[samples >= 0].sum(), (samples >= 0).sum())}
