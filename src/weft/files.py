"""Atomic files and folders: each is written under a hidden name in the same folder, then renamed into place.

A reader, or a crash at any moment, finds the old content or the new. A killed process leaves only hidden files. The
next writer of the same name replaces them; `replace_file` deletes them after an hour.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import UserError

ABANDONED = 3600.0  # seconds without a write before a partial file counts as abandoned; its writer may be remote


def partial_path(path: Path, mark: str | int = "") -> Path:
    """The hidden name under which `path` is written. Concurrent writers of one path need different marks."""
    return path.with_name(f".{path.name}.{mark}.partial" if mark else f".{path.name}.partial")


@contextmanager
def report_write_errors(path: Path, consequence: str = "nothing was written") -> Iterator[None]:
    """Turns an OSError of the block (disk full, permission denied) into a UserError about `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}; {consequence}", path) from error


def refuse_existing(out: Path, remedy: str = "name another folder") -> None:
    """Raises UserError if `out` exists, unless it is an empty folder."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"exists already; {remedy}, or move it away", out)


@contextmanager
def new_file(path: Path, mark: str | int = "", *, durable: bool = True) -> Iterator[BinaryIO]:
    """Opens a file for writing. It is renamed to `path` if the block succeeds and deleted otherwise.

    Args:
        durable: fsync the file and its folder before returning.

    Raises:
        OSError: the file cannot be written.
    """
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
    """Replaces a file's content atomically; concurrent calls are safe. Raises OSError."""
    with new_file(path, os.getpid(), durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    abandoned = re.compile(rf"\.{re.escape(path.name)}\.\d+\.partial")
    with suppress(OSError):  # another process may be deleting them too
        for entry in os.scandir(path.parent):
            if abandoned.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > ABANDONED:
                os.unlink(entry)


@contextmanager
def hidden_folder(out: Path, mark: str = "") -> Iterator[Path]:
    """Makes an empty hidden folder next to `out`, to be renamed by `publish`. Deletes it afterwards if it remains.

    Raises:
        UserError: another process is writing `out`.
        OSError: the folder cannot be made.
    """
    partial = partial_path(out, mark)
    lock = _lock_folder(partial, out)
    try:
        for left in partial.iterdir():  # by a killed process
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield partial
    finally:
        if _is_open_at(lock, partial):  # not renamed, and not another process's by now
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _lock_folder(partial: Path, out: Path) -> int:
    """Makes the hidden folder if needed and locks it. Returns the descriptor that holds the lock while open."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # its owner has just finished
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError("another process is writing it; wait for that, or name another folder", out) from None
        except OSError:
            pass  # a network file system without locks
        if _is_open_at(lock, partial):
            return lock
        os.close(lock)  # its owner renamed or deleted the folder meanwhile


def _is_open_at(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def publish(folder: Path, out: Path, *, replace: bool = False) -> None:
    """Renames a folder whose files are synced to `out`, and syncs the new name.

    Args:
        replace: exchange the folder with an existing `out`, then delete the old one. Otherwise `out` may only be an
            empty folder.

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
    """Swaps two names. The swap is atomic on Linux; elsewhere `other` is missing for an instant."""
    import ctypes  # takes 10 ms to import and is seldom needed

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
    """Deletes a folder. It is hidden first, so that a visible folder is never incomplete. Warns if deletion fails."""
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
        warnings.warn(f"{path}: could not be deleted: {error.strerror or error}", stacklevel=2)


def sync(path: Path) -> None:
    """Fsyncs a file, or the names in a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Fsyncs a folder and everything in it. Raises OSError."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file. Raises UserError if the file is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError("no such file", path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path) from None
    except json.JSONDecodeError as error:
        raise UserError(f"broken JSON: {error.msg}; the file is damaged, make it again", path, error.lineno) from None
    except UnicodeDecodeError:
        raise UserError("not UTF-8; the file is damaged, make it again", path) from None
    except (RecursionError, ValueError):  # such as a number of thousands of digits
        raise UserError("nested too deep, or a number too long; the file is damaged, make it again", path) from None
