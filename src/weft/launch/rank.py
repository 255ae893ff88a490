"""The process of a rank, as its launcher sees it: its start, its reports and its stderr."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from weft.observe.status import Progress
from weft.processes import COMMAND, LAUNCHER, STORE_SOCKET, usable_cores
from weft.train.failure_record import LINES

STACKS_SIGNAL = signal.SIGUSR2  # makes a rank write the Python stacks of its threads


@dataclass
class Rank(Progress):
    """The process of a rank, and the last activity that it reported to the launcher.

    Attributes:
        pipe: file descriptor from which the rank's reports are read.
        stacks: file to which the rank writes the Python stacks of its threads after STACKS_SIGNAL.
        stderr: file descriptor from which the rank's stderr is read; None if the rank has the launcher's stderr.
        unread: bytes of an incomplete report.
        last_lines: the last lines of the rank's stderr; the last line may be incomplete.
        message: the failure that the rank sent; None if it has sent none.
        ended: time at which the process ended; None while it is running.
    """

    number: int
    process: subprocess.Popen
    pipe: int
    stacks: IO[bytes]
    stderr: int | None = None
    unread: bytes = b""
    last_lines: deque[bytes] = field(default_factory=lambda: deque([b""], maxlen=LINES))
    message: Any = None
    ended: float | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exitcode(self) -> int:
        return self.process.returncode

    def read(self) -> bool:
        """Reads the rank's reports from the pipe. Returns False at the end of the pipe."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.message = report.get("failed", self.message)
            if "doing" in report:
                self.update(report)
        return bool(data)

    def forward_stderr(self) -> bool:
        """Copies what the rank wrote to stderr to this process's stderr. Returns False at the end of the pipe."""
        assert self.stderr is not None
        data = left = os.read(self.stderr, 1 << 16)
        first, *rest = data.split(b"\n")
        self.last_lines[-1] += first
        self.last_lines.extend(rest)
        with suppress(OSError):  # nobody reads this process's stderr
            while left:
                left = left[os.write(2, left) :]
        return bool(data)

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid}{', suspended by a signal' * self.is_stopped}): {self.doing}"

    @property
    def is_stopped(self) -> bool:
        """Whether the process is suspended, by SIGSTOP or a debugger."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state in "Tt"


def start_rank(
    command: Sequence[str],
    number: int,
    nproc: int,
    listener: socket.socket,
    keeps_stderr: bool = False,
    attempt: int = 1,
) -> Rank:
    """Starts rank `number`, with the environment variables of torchrun and an equal number of OpenMP threads per rank.

    Args:
        listener: a listening socket, which rank 0 uses for its TCPStore.
        keeps_stderr: whether the launcher reads the rank's stderr, to keep its last lines.
        attempt: number of the attempt to train, counted from 1.
    """
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the pipes)
    reading, writing = os.pipe()
    errors, into = os.pipe() if keeps_stderr else (None, None)
    environment = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // nproc)),
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),  # see `processes.attempt`
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        COMMAND: shlex.join(sys.argv),
        LAUNCHER: f"{os.getpid()} {writing} {stacks.fileno()}",
    }
    handles = [writing, stacks.fileno()]
    if number == 0:
        environment[STORE_SOCKET] = str(listener.fileno())
        handles.append(listener.fileno())
    try:
        process = subprocess.Popen(command, env=environment, pass_fds=handles, stderr=into, start_new_session=True)
    except OSError:
        stacks.close()
        os.close(reading)
        if errors is not None:
            os.close(errors)
        raise
    finally:
        os.close(writing)
        if into is not None:
            os.close(into)
    return Rank(number, process, reading, stacks, errors)
