"""Callbacks: code that runs at events of a run.

Each module of this package is a built-in callback. A config lists callbacks by name: `callbacks: [early_stopping]`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from weft.train.state import State

__all__ = ["Callback", "State"]


class Callback:
    """The interface of callbacks. A custom callback need not inherit from this class, and defines only the methods it
    needs.

    All ranks call all callbacks in the order of the config, so a callback can use collectives. The order in a step is
    `step`, then `saved` if a checkpoint was written, then `validated` if there was a validation.
    """

    def begin(self, state: State) -> None:
        """Called before the first step of a session, after the model and the saved state are loaded."""

    def step(self, state: State) -> None:
        """Called after each step, also if the update was skipped (see `state.updated`)."""

    def saved(self, state: State) -> None:
        """Called when the checkpoint of `state.step` is on disk."""

    def validating(self, state: State) -> AbstractContextManager[Any]:
        """Returns a context manager. The validation runs within its context."""
        return nullcontext()

    def validated(self, state: State) -> None:
        """Called after a validation, whose metrics are in `state.metrics`."""

    def ended(self, state: State) -> None:
        """Called when the run ends or stops (see `state.status`), after the last save. Not called after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for checkpoints: nested dicts of JSON values and tensors.

        A tensor whose key is the name of a parameter, and whose shape is the parameter's, must be sharded like the
        parameter. All other values must be equal on all ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state that `state_dict` returned. Called before `begin`, if the checkpoint has such a state."""
