"""Logs the learning rate of every parameter group."""

from __future__ import annotations

from weft.train.callbacks import Callback, State


class LrMonitor(Callback):
    """Logs the learning rate of each parameter group, named by the kind of its parameters: `lr/matrix`, `lr/norm`, ...

    If a kind has several groups, the index of the group follows, such as `lr/matrix/0`.
    """

    def step(self, state: State) -> None:
        """Logs the learning rates of this step, if the step is logged."""
        if not state.logged:
            return
        groups = state.optimizer.param_groups
        roles = [str(group.get("role", number)) for number, group in enumerate(groups)]
        names = [f"{role}/{n}" if roles.count(role) > 1 else role for n, role in enumerate(roles)]
        state.log({f"lr/{name}": group["lr"] for name, group in zip(names, groups, strict=True)})
