"""N processes of this command on this machine, by PyTorch's elastic launcher."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from weft.config.errors import UserError
from weft.launch.failures import account_for


def launch_local(command: Sequence[str], nproc: int, run_directory: Path) -> int:
    """Run `command` as ranks 0 to `nproc` - 1 and wait for them; signals to this process reach all of them.

    Each rank gets torchrun's environment, a share of the cores, and dies with this process, however that ends.

    Returns:
        0, or what `account_for` makes of the ranks that failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    elastic = logging.getLogger("torch.distributed.elastic")  # its loggers have levels of their own: stop them here
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    for_ranks = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # seconds to save a checkpoint on SIGTERM
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc)),
        **os.environ,
        "WEFT_LAUNCHER": str(os.getpid()),
    }
    with (
        patch.dict(os.environ, for_ranks),  # what this process starts afterwards is not this launcher's
        tempfile.TemporaryDirectory(prefix="weft-ranks-") as words,  # that ranks leave of how they ended
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            run_id=f"weft-{os.getpid()}",  # without one torch warns, before the rank's own line
            nproc_per_node=nproc,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=words),
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            return account_for(error.failures, run_directory)
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def die_with_launcher() -> None:
    """In a rank: make the kernel end this process when the launcher is gone, for a killed launcher tells nobody."""
    launcher = os.environ.pop("WEFT_LAUNCHER", None)  # a process that this one starts has another parent
    if launcher is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGKILL)  # it was gone before we asked


def default_nproc() -> int:
    """All GPUs of this machine; one process on a machine without."""
    import torch

    return max(1, torch.cuda.device_count())


# Each process takes a fifth of a gigabyte and more, and so many share a core only where a mesh is tried out.
MOST_A_CORE = 16


def checked_nproc(nproc: int | None) -> int:
    """The number of processes that the user asked for.

    Raises:
        UserError: not positive, more than there are GPUs, or more than any machine's memory has room for.
    """
    if nproc is None:
        return default_nproc()
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: at least 1 process is needed")
    import torch

    if torch.cuda.is_available() and nproc > torch.cuda.device_count():
        raise UserError(f"--nproc {nproc}: this machine has {torch.cuda.device_count()} GPUs; ask for at most that")
    most = MOST_A_CORE * (os.cpu_count() or 1)
    if nproc > most:
        raise UserError(f"--nproc {nproc}: this machine has {os.cpu_count()} cores; ask for at most {most}")
    return nproc
