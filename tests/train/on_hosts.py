"""What ranks do that stand for hosts: each host has a disk of its own, which is a folder."""

import contextlib
import errno
import io
import os
import signal
import sys
import time
from pathlib import Path

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir")  # Python's audit events


def fit_killed_at(file: Path, disks: list[Path], victim: int, number: int) -> int:
    """As `fit`, but the rank `victim` is killed before its operation `number` on a local checkpoint (0: never).

    Returns:
        The number of operations.
    """
    rank, count, mine = int(os.environ["RANK"]), 0, str(disks[int(os.environ["RANK"])])

    def audit(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in OPERATIONS and any(str(one).startswith(mine) for one in arguments if isinstance(one, str | Path)):
            count += 1
            if rank == victim and count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    fit(file, disks)
    return count


def fit_on_full_disk(file: Path, disks: list[Path], victim: int) -> str:
    """As `fit`, but the disk of the rank `victim` is full when it receives files; returns the error."""
    from weft.checkpoint import hosts
    from weft.errors import UserError

    def full(path: Path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    if int(os.environ["RANK"]) == victim:
        hosts.new_file = full
    try:
        return fit(file, disks)
    except UserError as error:
        return str(error)


def fit_until_deadline(file: Path, disks: list[Path], seconds: int) -> str:
    """As `fit`, but the run is told to stop after step 3, within `seconds`, and the run directory's disk is stuck."""
    from weft.checkpoint.save import StagedSave
    from weft.train.loop import Loop

    write, after = StagedSave.write, Loop.after_update

    def stuck(self, *rest, **options):
        if self.hosts is None:
            time.sleep(60)
        return write(self, *rest, **options)

    def asked(self, step):
        after(self, step)
        if step == 3 and self.world.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    os.environ["WEFT_STOP_WITHIN"] = str(seconds)
    StagedSave.write, Loop.after_update = stuck, asked
    return fit(file, disks)


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
