"""Modules for `weft.planner.parallelize.verify`, whose processes import them by name."""

import os
import signal

import modules_to_parallelize as modules
import torch


def gpt():
    """A tiny GPT that knows its sequence."""
    return modules.GPT(layers=1)


class Wrong(torch.nn.Linear):
    """Computes something else on each rank: what no module may do."""

    def forward(self, x):
        return super().forward(x) * (1 + torch.distributed.is_initialized() * torch.distributed.get_rank())


def fails():
    """A module that cannot be made."""
    raise ValueError("no rows")


def killed():
    """A module whose second process is killed while it is made, as by a lack of memory."""
    if os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.Linear(4, 4)
