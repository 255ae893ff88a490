"""Writes files and folders atomically: writes the content under a hidden name next to the path, then renames it.

A reader always finds either the old content or the new content, also after a crash. A process that is killed leaves
only hidden files, which the next writer of the same path replaces. `replace_file` also deletes hidden files of its path
that have not been written to for an hour.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import UserError

SETTLED = 2.0  # seconds: a later change of a file may not change its time, if the clock of the file system is coarse
ABANDONED = 3600.0  # seconds without a write after which a hidden file is deleted; its writer may be on another host


def partial_path(path: Path, mark: str | int = "") -> Path:
    """Returns the hidden name under which `path` is written. The name contains `mark`.

    Concurrent writers of a path need different marks.
    """
    return path.with_name(f".{path.name}.{mark}.partial" if mark else f".{path.name}.partial")


@contextmanager
def report_write_errors(path: Path, consequence: str = "nothing was written") -> Iterator[None]:
    """Context in which an OSError (disk full, permission denied) becomes a UserError about `path`.

    Args:
        consequence: end of the message: the state of the files after the error, or what the user can do.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}; {consequence}", path) from error


def require_space(folder: Path, needed: int) -> None:
    """Raises OSError if the disk of a folder has fewer free bytes than `needed`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"the disk is full: {needed:,} bytes are needed, {free:,} are free")


def refuse_existing(out: Path, remedy: str = "choose another folder") -> None:
    """Raises UserError if `out` exists and is not an empty folder.

    Args:
        remedy: the first remedy in the message.
    """
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"already exists; {remedy}, or move the existing one away", out)


@contextmanager
def new_file(path: Path, mark: str | int = "", *, durable: bool = True) -> Iterator[BinaryIO]:
    """Context that opens a hidden file. Renames the file to `path` if the block succeeds; deletes the file if it fails.

    A pipe or a device, such as /dev/null, is written itself: a rename would replace it.

    Args:
        mark: text or number in the hidden name. Concurrent writers of a path need different marks.
        durable: whether to fsync the file and its folder.

    Raises:
        OSError: the file cannot be written.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with open(path, "wb") as file:
            yield file
        return
    partial = partial_path(path, mark)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.absolute().parent)


def replace_file(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replaces the content of a file atomically; concurrent calls are safe. Raises OSError if writing fails.

    Args:
        durable: whether to fsync the file and its folder.
    """
    with new_file(path, os.getpid(), durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    abandoned = re.compile(rf"\.{re.escape(path.name)}\.\d+\.partial")
    with suppress(OSError):  # another process may be deleting them too
        for entry in os.scandir(path.parent):
            if abandoned.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > ABANDONED:
                os.unlink(entry)


@contextmanager
def hidden_folder(out: Path, mark: str = "") -> Iterator[Path]:
    """Context that makes an empty hidden folder next to `out`. The block fills the folder and passes it to `publish`.

    If `publish` has not renamed the folder, the folder is deleted after the block.

    Args:
        mark: text in the hidden name. Concurrent writers of a path need different marks.

    Raises:
        UserError: another process is writing `out`.
        OSError: the folder cannot be made.
    """
    partial = partial_path(out, mark)
    lock = _lock_folder(partial, out)
    try:
        for left in partial.iterdir():  # files of a process that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield partial
    finally:
        if _is_open_at(lock, partial):  # not renamed by `publish`, and not replaced by another process
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def lock_exclusively(descriptor: int, what: str, where: Path) -> bool:
    """Locks an open file or folder until its descriptor is closed. Returns False on a file system without locks.

    Raises:
        UserError: another process has the lock. The message is the path `where`, followed by the text `what`.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(what, where) from None
    except OSError:
        return False  # a network file system without locks
    return True


def unlock(descriptor: int) -> None:
    """Unlocks what `lock_exclusively` locked, also in the processes that inherited the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Context manager that waits for the lock of a file, and holds it. Yields whether the file system has locks.

    The file is created if needed, and is not deleted.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            supported = True
        except OSError:
            supported = False
        yield supported
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Returns the user's cache folder: `$WEFT_CACHE`, `$XDG_CACHE_HOME/weft` or `~/.cache/weft`."""
    if given := os.environ.get("WEFT_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def file_stamps(files: Sequence[Path]) -> list[list[int]]:
    """Returns what changes if a file is changed or replaced, for each file: size, times, inode and device.

    Raises:
        UserError: a file does not exist or cannot be accessed.
    """
    stamps = []
    for path in files:
        try:
            found = os.stat(path)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}; check the file and its permissions", path) from None
        stamps.append([found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev])
    return stamps


def folder_stamp(folder: Path) -> tuple:
    """Returns a hashable value that changes if the folder is replaced, or a file directly in it is changed."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stamps = zip((path.name for path in files), map(tuple, file_stamps(files)), strict=True)
    return folder.resolve(), *stamps


def recall(place: Path, stamps: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digests that `remember` wrote to the file `place`, of the names whose stamps are unchanged."""
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = json.loads(place.read_bytes())
    return {name: known[name][1] for name, stamp in stamps.items() if known.get(name, [None])[0] == stamp}


def remember(place: Path, stamps: Mapping[str, Any], digests: Mapping[str, str], read_at: float) -> None:
    """Writes digests to the file `place`, except of files that changed shortly before they were read.

    Does nothing if the file cannot be written.

    Args:
        stamps: name -> stamp of a file, or list of the stamps of several files (`file_stamps`).
        read_at: the time when reading the files began.
    """
    settled = {}
    for name, stamp in stamps.items():
        times = [time for one in (stamp if isinstance(stamp[0], list) else [stamp]) for time in one[1:3]]
        if max(times) / 1e9 < read_at - SETTLED:
            settled[name] = [stamp, digests[name]]
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, json.dumps(settled), durable=False)


def _lock_folder(partial: Path, out: Path) -> int:
    """Makes the hidden folder `partial` if needed, and locks it.

    Returns the folder's file descriptor. The lock lasts until the descriptor is closed.

    Args:
        out: path that the error message names if another process has the lock.
    """
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process has just renamed or deleted the folder
        try:
            lock_exclusively(
                lock, "another process is writing this folder; wait until it ends, or choose another folder", out
            )
        except UserError:
            os.close(lock)
            raise
        if _is_open_at(lock, partial):
            return lock
        os.close(lock)  # another process has renamed or deleted the folder meanwhile


def _is_open_at(handle: int, path: Path) -> bool:
    """Whether a file descriptor refers to the file or folder that is at `path` now."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def publish(folder: Path, out: Path, *, replace: bool = False) -> None:
    """Renames a folder to `out`. If the caller has fsynced the folder's files, the renamed folder survives a crash.

    Args:
        replace: whether to replace an existing `out`: the two folders are exchanged, then the old one is deleted. If
            False, `out` must not exist or be an empty folder.

    Raises:
        OSError: the folder cannot be renamed.
    """
    sync(folder)
    if replace and os.path.lexists(out):
        _exchange(folder, out)
        sync(out.absolute().parent)
        remove(folder)
    else:
        os.rename(folder, out)
        sync(out.absolute().parent)


def _exchange(one: Path, other: Path) -> None:
    """Swaps two files or folders. This is atomic on Linux; on other systems `other` is missing for an instant."""
    import ctypes  # imported here because the import takes 10 ms and is seldom needed

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    if rename is not None and rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0:
        return
    old = other.with_name(f".{other.name}.old")
    remove(old)
    os.rename(other, old)
    os.rename(one, other)
    os.rename(old, one)


def remove(path: Path) -> None:
    """Deletes a folder, or a link to one. Warns if deletion fails.

    The folder is first renamed to a hidden name, so that a visible folder is always complete.
    """
    if not os.path.lexists(path):
        return
    try:
        if not path.name.startswith("."):
            old = path.with_name(f".{path.name}.old")
            remove(old)
            os.rename(path, old)
            path = old
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path}: could not be deleted ({error.strerror or error}); delete it yourself", stacklevel=2)


def sync(path: Path) -> None:
    """Fsyncs a file, or a folder's entries (the names, not the files' contents). Raises OSError if fsync fails."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Fsyncs a folder and everything in it. Raises OSError if fsync fails."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file. Raises UserError if the file is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError("this file does not exist; check the path", path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; check the file and its permissions", path) from None
    except json.JSONDecodeError as error:
        raise UserError(f"invalid JSON ({error.msg}); restore the file or write it again", path, error.lineno) from None
    except UnicodeDecodeError:
        raise UserError("the file is not UTF-8 text; restore the file or write it again", path) from None
    except (RecursionError, ValueError):  # for example, a number with thousands of digits
        raise UserError(
            "invalid JSON (nested too deeply, or a number is too long); restore the file or write it again", path
        ) from None
