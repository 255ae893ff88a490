"""Trains on a changing number of hosts, by PyTorch's elastic agent on each host.

The agent of each host starts the ranks, and starts them again when a rank fails, or when a host leaves or joins. The
ranks then choose the nearest legal mesh (`config.legal_mesh.elastic_mesh`) and resume from the last checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.errors import UserError
from weft.formatting import counted
from weft.launch.elastic_hosts import ElasticHosts
from weft.launch.failures import Verdict, judge_failures, print_error, read_error_file, report_verdict
from weft.processes import COMMAND, ELASTIC, EXIT_LOST
from weft.train.stop import stop_within

BACKEND = "weft"  # name of `Rounds` in PyTorch's registry
KEEP_ALIVE, MISSED = 2, 4  # a host whose agent gave no sign of life for 2 x 4 seconds is lost
LAST_CALL = 5  # seconds in which more hosts can join after the minimum number has
JOIN = 24 * 3600  # seconds that a host waits for the others: a lost one may be repaired
STOP_SECONDS = 30  # in which ranks can save when a host joins or this one leaves, without --stop-within


class Ended(Exception):
    """The run has ended for all hosts, because a restart does not help."""


class Rounds(RendezvousHandler):
    """The rendezvous of the hosts, which is closed after a failure that a restart does not help against.

    Args:
        inner: PyTorch's rendezvous.

    Attributes:
        verdict: about the last round; None if there was none, or no rank reported an error.
    """

    current: Rounds | None = None  # of this process

    def __init__(self, inner: RendezvousHandler, logs: Path, fixed: bool):
        self.inner, self.logs, self.fixed = inner, logs, fixed
        self.began = 0.0
        self.verdict: Verdict | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self.verdict = self.judge()
        stopped = self.fixed and self.verdict is not None and self.verdict.code > 128
        if self.verdict is not None and (stopped or not (self.verdict.restartable or self.verdict.code > 128)):
            self.inner.set_closed()
            raise Ended
        info = self.inner.next_rendezvous()
        self.began = time.time()
        return info

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self.inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        return self.inner.shutdown()

    @property
    def use_agent_store(self) -> bool:
        return self.inner.use_agent_store

    def judge(self) -> Verdict | None:
        """Returns the verdict about the ranks of this host that reported an error in the last round."""
        found = {}
        for number, path in enumerate(sorted(self.logs.rglob("error.json"))):
            if path.stat().st_mtime >= self.began > 0:
                found[number] = Reported(message=read_error_file(path))
        return judge_failures(found) if found else None


@dataclass(frozen=True)
class Reported:
    """A failed rank of which only the reported error is known (see `failures.Failure`)."""

    message: Any
    exitcode: int = 1
    pid: int = 0


def train_elastic(command: Sequence[str], nproc: int, run: Path, hosts: ElasticHosts) -> int:
    """Trains in `nproc` processes on this host, together with the other hosts, and returns the exit code.

    Args:
        command: the command of a rank.
        run: the run directory, which all hosts share.

    Raises:
        UserError: the other hosts cannot be reached.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # Weft reports what failed
    os.environ[COMMAND] = shlex.join(sys.argv)
    os.environ[ELASTIC] = f"{os.getpid()} {hosts.least} {hosts.most}"
    # Each round has a store of its own: a host that is gone may have had that of the last round.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    within = stop_within()
    seconds = STOP_SECONDS if within is None else max(1, int(within))
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(seconds)
    logs = Path(tempfile.mkdtemp(prefix="weft-"))

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        backend, store = create_backend(parameters)
        Rounds.current = Rounds(create_handler(store, backend, parameters), logs, hosts.least == hosts.most)
        return Rounds.current

    with suppress(ValueError):  # registered by an earlier call in this process
        rendezvous_handler_registry.register(BACKEND, create)
    config = LaunchConfig(
        min_nodes=hosts.least,
        max_nodes=hosts.most,
        nproc_per_node=nproc,
        run_id=f"weft-{run.name}",
        rdzv_backend=BACKEND,
        rdzv_endpoint=hosts.endpoint,
        rdzv_configs={
            "join_timeout": JOIN,
            "last_call_timeout": LAST_CALL,
            "keep_alive_interval": KEEP_ALIVE,
            "keep_alive_max_attempt": MISSED,
        },
        max_restarts=hosts.restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
    )
    if "shutdown_timeout" in {field.name for field in dataclasses.fields(config)}:  # newer versions of PyTorch
        config.shutdown_timeout = seconds
    try:
        return run_agent(config, command, run, hosts)
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def run_agent(config: LaunchConfig, command: Sequence[str], run: Path, hosts: ElasticHosts) -> int:
    """Runs PyTorch's agent until the run ends, or this host leaves it, and returns the exit code."""
    print_error(f"waiting for {counted(hosts.least, 'host')} at {hosts.endpoint} (--rendezvous)")
    try:
        elastic_launch(config, command[0])(*command[1:])
    except Ended:
        assert Rounds.current is not None
        assert Rounds.current.verdict is not None
        return report_verdict(Rounds.current.verdict, run)
    except ChildFailedError as error:
        failures = {
            rank: Reported(read_error_file(Path(failure.error_file)), failure.exitcode, failure.pid)
            for rank, failure in error.failures.items()
        }
        return report_verdict(judge_failures(failures), run)
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousClosedError:
        print_error("the run has ended on another host, whose messages give the reason")
        return EXIT_LOST
    except RendezvousError as error:
        raise UserError(f"--rendezvous {hosts.endpoint}: {error}; start the command on that host, too") from None
    return 0
