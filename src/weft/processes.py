"""Local processes: what they inherit from the launcher, and that they end with their parent."""

from __future__ import annotations

import os
import signal
import sys

LAUNCHER = "WEFT_LAUNCHER"  # in a rank's environment: the launcher's process and the pipe that it reads
STORE_SOCKET = "WEFT_STORE_SOCKET"  # in the first rank's: a listening socket, at which its store is to answer


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent is gone: a killed parent tells nobody (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # takes 10 ms

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent was gone before the kernel knew
