"""Finds out whether anything but an update can write to weights and optimizer state before the next update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.config.custom_components import custom_types
from weft.config.run import RunConfig
from weft.train.given_batches import GivenBatches
from weft.train.rollouts.source import RolloutSource

if TYPE_CHECKING:
    from weft.train.loop import Loop


def has_custom_passes(config: RunConfig) -> bool:
    """Whether forward or backward passes run custom code. Custom callbacks run after the update, and before a save."""
    keys = {key.partition(".")[0] for key, _ in custom_types(config.as_dict())}
    return not keys.isdisjoint({"model", "objective", "log"})  # `log.metrics` can compute from the model's outputs


def only_updates_write(loop: Loop, step: int) -> bool:
    """Whether, after a save at `step`, the next update is the next to write to weights and optimizer state.

    Validations with averaged weights write before it. Generated samples, rollouts and the user's own loop can. For
    custom code in passes, see `has_custom_passes`.
    """
    if isinstance(loop.data.source, GivenBatches | RolloutSource):
        return False
    if loop.data.validates and loop.due(step, loop.length.validation_every):
        return False
    return loop.sampler is None or not loop.sampler.prompts or not loop.due(step, loop.length.samples_every)
