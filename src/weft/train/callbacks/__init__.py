"""Callbacks: actions at moments of a run. Each built-in one is a file of this folder: `callbacks: [early_stopping]`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from weft.train.state import State

__all__ = ["Callback", "State"]


class Callback:
    """What a callback may have; a class of its own need not inherit from this one, and has the methods that it needs.

    All ranks call all callbacks in the order of the list, so that a callback may use collectives. Of one step the order
    is `step`, then `saved` if a checkpoint was written, then `validated` if there was a validation.
    """

    def begin(self, state: State) -> None:
        """The model and what was saved are there; the next step is `state.step + 1`."""

    def step(self, state: State) -> None:
        """An update was made."""

    def saved(self, state: State) -> None:
        """A checkpoint of `state.step` is on the disk."""

    def validating(self, state: State) -> AbstractContextManager[Any]:
        """A context in which the validation runs."""
        return nullcontext()

    def validated(self, state: State) -> None:
        """`state.metrics` has the measurements on held-out data."""

    def ended(self, state: State) -> None:
        """The run is over, as `state.status` says; its last checkpoint is on the disk. Not called after an error."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values and tensors in nested dicts, the same on all ranks but for tensors named
        after parameters, which are sharded as these are."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; called before `begin`."""
