"""Opens the data of a run: those of `data.train`, those of the user's own loop, or what the model generates."""

from __future__ import annotations

from typing import Any, Literal

from weft.config.derive import derive_intervals
from weft.errors import UserError
from weft.train.data import Data, layout_of, open_data, open_given
from weft.train.hooks import Callbacks
from weft.train.job import Job
from weft.train.rollouts.source import RolloutSource


def open_run_data(job: Job, objective: Any, callbacks: Callbacks, batches: Literal["global", "local"] | None) -> Data:
    """Opens the data of a run. All ranks call it.

    Args:
        callbacks: gets the source of rollouts, which logs metrics and has state in checkpoints.
        batches: what is passed to `Trainer.step`; None: `Trainer.fit` reads or generates the batches.
    """
    config, world = job.config, job.world
    if batches is not None:
        return world.agree(lambda: open_given(config, world, job.console, objective, batches))
    if not config.generates:
        return world.agree(lambda: open_data(config, world, job.console, layout_of(objective, config)))
    source = world.agree(lambda: open_rollouts(job, objective))
    source.check_ranks()
    callbacks.add("rollouts", source)
    return Data(derive_intervals(config), source, (), {"train": source.prompts.digest})


def open_rollouts(job: Job, objective: Any) -> RolloutSource:
    """Returns the source of a run whose model generates its training data."""
    if not hasattr(objective, "rollouts"):
        name = job.config.objective.type
        raise UserError(f"objective: {name} has the argument updates_per_rollout, but no attribute rollouts; set it")
    return RolloutSource(job, objective, layout_of(objective, job.config))
