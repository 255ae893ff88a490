"""What ranks do that stand for hosts: each host has a disk of its own, which is a folder."""

import contextlib
import io
import os
import signal
from pathlib import Path


def fit(file: Path, disks: list[Path], overrides: tuple[str, ...] = (), dies_after: int | None = None) -> str:
    """Trains as the rank RANK, on the host whose disk is `disks[RANK]`; returns what it printed.

    All ranks are killed after the step `dies_after`.
    """
    from weft.config.run import RunConfig
    from weft.train.loop import Loop
    from weft.train.trainer import Trainer

    os.environ["NODE_DISK"] = str(disks[int(os.environ.get("RANK", 0))])
    after = Loop.after_update

    def dies(self, step):
        after(self, step)
        if dies_after is not None:
            self.saver.finish()  # so that every step is saved, also beside the training
        if step == dies_after:
            self.world.barrier()  # the others have saved, too
            os.kill(os.getpid(), signal.SIGKILL)

    Loop.after_update = dies
    with contextlib.redirect_stderr(io.StringIO()) as said:
        Trainer(RunConfig.load(file, overrides)).fit()
    return said.getvalue()
