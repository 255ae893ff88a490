"""Helpers for processes: the launcher's variables, signal handlers, ending a process with its parent, the compiler."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAUNCHER = "WEFT_LAUNCHER"  # environment variable of a rank: the launcher's process id and the pipe that it reads
COMMAND = "WEFT_COMMAND"  # of a rank: the command that started the launcher, for the manifest
launched_by = ""  # the value of COMMAND in this rank, whose child processes do not inherit it
ELASTIC = "WEFT_ELASTIC"  # of a rank under `weft train --rendezvous`: process id of the agent, min. and max. hosts
EXIT_LOST = 3  # exit code: a process was killed, or hung, and the last step is not saved
STORE_SOCKET = "WEFT_STORE_SOCKET"  # environment variable of rank 0: a listening socket for its store


def attempt() -> int:
    """Returns the number of this attempt to train, counted from 1. Weft's launcher and torchrun count restarts."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + 1


def take_command() -> None:
    """Moves the launcher's command from the environment of this rank to `launched_by`."""
    global launched_by
    launched_by = os.environ.pop(COMMAND, "") if "RANK" in os.environ else ""


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as `SIGSEGV`, or `signal 40` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def usable_cores() -> int:
    """Returns the number of CPU cores in this process's affinity mask.

    On systems without affinity masks, returns the number of all cores.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Returns the bytes of memory of this machine, or the limit of the container in which this process runs."""
    import psutil

    found = [psutil.virtual_memory().total]
    for folder, unified in control_groups("memory"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int((folder / f"memory.{'max' if unified else 'limit_in_bytes'}").read_text()))
    return min(found)


def available_memory() -> int:
    """Returns the number of bytes that this process can still allocate.

    This is the machine's available memory, or less if the process runs in a container with a memory limit.
    """
    import psutil

    free = [psutil.virtual_memory().available]
    for folder, unified in control_groups("memory"):
        names = ("max", "current", "inactive_file")
        limit, usage, unused = names if unified else ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such file, or "max"
            pages = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / f"memory.{usage}").read_text()) - int(pages[unused])
            free.append(int((folder / f"memory.{limit}").read_text()) - used)
    return max(0, min(free))


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields (folder, unified) for this process's control group and each of its parent groups (Linux only).

    `unified` is whether the folder belongs to the unified hierarchy (cgroup version 2).

    Args:
        controller: name of a controller, such as "cpu" or "memory".
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = Path("/sys/fs/cgroup", controller if controllers else "")
        group = top / name.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, not controllers
            if folder == top:
                break


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent, the process `parent`, ends or is killed (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # takes 10 ms

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the call


@contextmanager
def signal_handler(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Context in which `handler` handles the signals `numbers`.

    Outside the main thread, the context does nothing, because Python sets signal handlers only in the main thread.
    SIGHUP stays ignored in a process that ignores it (`nohup`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = {number for number in numbers if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number in numbers if number not in ignored}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def boot_id() -> str:
    """Returns an id of this host's last start; "" if unknown. Process ids of another start mean nothing."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def process_exists(pid: int) -> bool:
    """Whether a process of this host exists, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def cpp_compiler() -> str | None:
    """Returns the path of the C++ compiler that `torch.compile` runs for code of CPUs; None if none works."""
    return ask_compiler()[0]


def ask_compiler() -> tuple[str | None, str]:
    """Returns the path of the C++ compiler, as `cpp_compiler`; or None, and the last line of its error message."""
    path = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    if path is None:
        return None, ""
    try:
        asked = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:  # not for this processor, no program, or it waits
        return None, str(error)
    if asked.returncode == 0:  # Inductor asks the same
        return path, ""
    return None, asked.stderr.decode(errors="replace").strip().rpartition("\n")[2]
