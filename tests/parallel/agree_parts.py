"""Runs that fail on one rank only, and what each rank then says."""

import os
from pathlib import Path

from weft.config.run import RunConfig
from weft.parallel import ranks
from weft.train.trainer import Trainer


class Refuses:
    """A tracker that is made on the first rank, and cannot be."""

    def __init__(self, run):
        raise ValueError("no room for this tracker")

    def log(self, step, metrics): ...

    def text(self, step, name, text): ...

    def close(self): ...


def failure(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "quiet", None), getattr(error, "elsewhere", False)


def fit(file: Path, folder: Path):
    """Train; the second rank is in another folder, in which relative paths lead nowhere."""
    config = RunConfig.load(file)
    if os.environ["RANK"] == "1":
        os.chdir(folder)
    return failure(Trainer(config, fresh=True).fit)


def agree_on_an_exception():
    """Of the second rank and the third."""
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    found = failure(lambda: ranks.agree(lambda: [0][min(ranks.rank(), 1)]))
    return found, ranks.agree(ranks.rank), ranks.agree(ranks.rank, only_first=True)
