"""Both hosts of `two_hosts.py`, with one import of torch: torchrun of each host, and its ranks, are forks.

`python forked_hosts.py PID WORD ...`: process PID has the namespaces of the second host; the words are torchrun's.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "parallel")]

import forked
from pool import IMPORTS, no_measuring
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler


class Rank(forked.Child):
    """What torchrun asks of a `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], env: dict[str, str], stdout: None, stderr: None, **options: bool):
        assert args[:3] == (sys.executable, "-u", "-m"), args
        super().__init__([args[0], *args[2:]], env, **options)

    def wait(self, timeout: float | None = None) -> int | None:
        end = time.monotonic() + (timeout or 0)
        while timeout is not None and self.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        return super().wait() if timeout is None else self.poll()


def enter(process: int, *namespaces: str) -> None:
    """Be in the namespaces of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in namespaces:
        with open(f"/proc/{process}/ns/{name}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns: {name}")


def host(output: str, words: Sequence[str], before: Callable[[], None] = lambda: None) -> int:
    """A process that runs torchrun as a host; what it and its ranks write is in a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        before()
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        run.main(words)
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(code)


def main(process: int, words: Sequence[str]) -> int:
    """Runs both hosts. Returns 0 if both succeed."""
    for name in IMPORTS:
        if name != "warm":
            importlib.import_module(name)
    no_measuring()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    forked._AT_START.update(map(int, os.listdir("/proc/self/fd")))
    subprocess_handler.Popen = Rank
    hosts = [host("two.out", words, lambda: enter(process, "net", "uts")), host("one.out", words)]
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in hosts)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
