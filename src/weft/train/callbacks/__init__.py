"""Callbacks: actions at events of a run. Each file of this folder is a built-in one: `callbacks: [early_stopping]`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from weft.train.state import State

__all__ = ["Callback", "State"]


class Callback:
    """The interface of callbacks. A custom callback need not inherit from it, and has the methods that it needs.

    All ranks call all callbacks in the order of the list, so a callback may use collectives. The order in a step is
    `step`, then `saved` if a checkpoint was written, then `validated` if there was a validation.
    """

    def begin(self, state: State) -> None:
        """Called before the first step of a session, with the model and saved state loaded."""

    def step(self, state: State) -> None:
        """Called after each update."""

    def saved(self, state: State) -> None:
        """Called when a checkpoint of `state.step` is on disk."""

    def validating(self, state: State) -> AbstractContextManager[Any]:
        """Returns a context in which a validation runs."""
        return nullcontext()

    def validated(self, state: State) -> None:
        """Called after a validation, whose metrics are in `state.metrics`."""

    def ended(self, state: State) -> None:
        """Called at the end of the run (see `state.status`), after its last checkpoint. Not called after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for checkpoints: JSON values and tensors in nested dicts, equal on all ranks. A tensor
        whose key is the name of a parameter is sharded as the parameter is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`; called before `begin`."""
