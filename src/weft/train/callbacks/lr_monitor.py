"""The learning rate of every group of parameters, in the metrics."""

from __future__ import annotations

from weft.train.callbacks import Callback, State


class LrMonitor(Callback):
    """Logs `lr/matrix`, `lr/norm`, ...: each parameter group by its role, with a number where a role has several."""

    def step(self, state: State) -> None:
        """Log the rates of the update that was made."""
        if not state.logged:
            return
        groups = state.optimizer.param_groups
        roles = [str(group.get("role", number)) for number, group in enumerate(groups)]
        names = [f"{role}/{n}" if roles.count(role) > 1 else role for n, role in enumerate(roles)]
        state.log({f"lr/{name}": group["lr"] for name, group in zip(names, groups, strict=True)})
