"""Locks the directory of a run, so that only one process at a time writes it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.files import lock_exclusively, unlock
from weft.observe.manifest import now
from weft.processes import boot_id, process_exists

LOCK = ".lock"
RECENT = 60.0  # seconds
LAST_WORKERS = 20.0  # seconds


def lock_run(path: Path, remedy: str) -> int:
    """Locks a run directory until this process ends or calls `unlock_run`. The file records who has the lock.

    Args:
        remedy: what the user can do if another process has the lock, other than to wait.

    Returns:
        The file descriptor of the lock.

    Raises:
        UserError: another process trains in the directory, or the lock cannot be opened; a symbolic link is not.
    """
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        what = f"the run directory cannot be locked ({LOCK}: {error.strerror}); set run.directory"
        raise UserError(what, path) from None
    owner = _read_owner(lock)
    who = f" (process {owner['pid']} on {owner['host']}, since {owner['since']})" if owner else ""
    busy = f"another process{who} is training in this run directory; wait for it, or {remedy}"
    try:
        if not _lock(lock, owner, busy, path) and owner and _may_be_running(owner, path):
            raise UserError(busy, path)
    except UserError:
        os.close(lock)
        raise
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "boot": boot_id(), "since": now()}).encode()
    os.ftruncate(lock, 0)
    os.pwrite(lock, content, 0)
    return lock


def unlock_run(lock: int) -> None:
    """Unlocks a run directory, and removes who had the lock from the file.

    The lock belongs to the open file, which forked processes (such as data workers) share: closing the descriptor
    alone would leave the directory locked until the last of them has ended.
    """
    with suppress(OSError):
        os.ftruncate(lock, 0)
        unlock(lock)
    os.close(lock)


def _lock(lock: int, owner: Mapping[str, Any] | None, busy: str, path: Path) -> bool:
    """Locks the open lock file. Returns False on a file system without locks.

    If the recorded owner died on this host, its data workers, which inherited the lock, are about to end: waits for
    them, at most `LAST_WORKERS` seconds.
    """
    deadline = time.monotonic() + LAST_WORKERS
    while True:
        try:
            return lock_exclusively(lock, busy, path)
        except UserError:
            died = owner is not None and owner["host"] == socket.gethostname() and not process_exists(owner["pid"])
            if not died or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _read_owner(lock: int) -> dict[str, Any] | None:
    """Returns who last locked a run directory: `host`, `pid`, `boot` and `since`; None if nobody is recorded."""
    with suppress(OSError, ValueError):
        owner = json.loads(os.pread(lock, 4096, 0))
        if isinstance(owner, dict) and isinstance(owner.get("pid"), int) and {"host", "boot", "since"} <= owner.keys():
            return owner
    return None


def _may_be_running(owner: Mapping[str, Any], path: Path) -> bool:
    """Whether the recorded owner of a run directory may still train, on a file system that has no locks.

    On this host, its process must exist. On another host, it must have written to the run in the last minute.
    """
    if owner["host"] == socket.gethostname():
        return owner["boot"] == boot_id() and owner["pid"] != os.getpid() and process_exists(owner["pid"])
    written = [file.stat().st_mtime for file in (path / "metrics.jsonl", *path.glob("logs/*")) if file.is_file()]
    return time.time() - max(written, default=0.0) < RECENT
