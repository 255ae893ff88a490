"""Files and folders that appear whole or not at all: written under a hidden name beside, then renamed into place.

A reader, and a crash at any moment, finds the old content or the new. What a killed process leaves is hidden, and the
next writer of the same name replaces it, or deletes it (`replace_file`, an hour later).
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

ABANDONED = 3600.0  # seconds without a write, after which a file's writer is dead: it may be on another machine


def partial_path(path: Path, mark: str | int = "") -> Path:
    """The hidden name under which `path` is written. `mark` tells writers apart that must not share one."""
    return path.with_name(f".{path.name}.{mark}.partial" if mark else f".{path.name}.partial")


@contextmanager
def unwritable(path: Path, then: str = "nothing was made") -> Iterator[None]:
    """Make an OSError of the block (a full disk, no permission) a UserError about `path`; `then`: what follows."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}; {then}", path) from error


def refuse_taken(out: Path, instead: str = "name another folder") -> None:
    """Raise UserError if something is there already: anything but an empty folder."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"exists already; {instead}, or move it away", out)


@contextmanager
def new_file(path: Path, mark: str | int = "", *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` when the block ends well, and is deleted otherwise.

    Args:
        durable: whether the file is on the disk, and not only in the system's memory, when the block has ended.

    Raises:
        OSError: it cannot be written.
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
    """Give a file new content in one step, whoever else does the same. Raises OSError."""
    with new_file(path, os.getpid(), durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    _sweep(path)


def _sweep(path: Path) -> None:
    """Delete what killed writers of a file have left under the names of their processes."""
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+\.partial")
    with suppress(OSError):  # another sweeps too
        for left in os.scandir(path.parent):
            if name.fullmatch(left.name) and time.time() - left.stat().st_mtime > ABANDONED:
                os.unlink(left)


@contextmanager
def hidden_folder(out: Path, mark: str = "") -> Iterator[Path]:
    """An empty hidden folder beside `out`, to be published as it; what is left of it after the block is deleted.

    Raises:
        UserError: another process makes `out` now.
        OSError: it cannot be made.
    """
    partial = partial_path(out, mark)
    lock = _claim(partial, out)
    try:
        for left in partial.iterdir():  # by a process that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield partial
    finally:
        if _is_open_at(lock, partial):  # not renamed; nor another process's by now
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _claim(partial: Path, out: Path) -> int:
    """Make the hidden folder, or take what is there, and lock it for as long as the returned descriptor is open."""
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
            raise UserError("another process is making it now; wait for that, or name another folder", out) from None
        except OSError:
            pass  # a network's disk without locks
        if _is_open_at(lock, partial):
            return lock
        os.close(lock)  # of one that its owner renamed or deleted meanwhile


def _is_open_at(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


def publish(made: Path, out: Path, *, replace: bool = False) -> None:
    """Give a folder whose files are on the disk its name, in one rename; afterwards the name is on the disk as well.

    Args:
        replace: exchange it for what is there, which is then deleted. Without it, only an empty folder may be there.

    Raises:
        OSError: it cannot be renamed.
    """
    sync(made)
    if replace and os.path.lexists(out):
        _exchange(made, out)
        sync(out.absolute().parent)
        remove(made)
    else:
        os.rename(made, out)
        sync(out.absolute().parent)


def _exchange(one: Path, other: Path) -> None:
    """Swap two names. At once where the system can (Linux); else with an instant without `other`."""
    import ctypes  # takes 10 ms, and is seldom needed

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
    """Delete a folder: it is hidden first, so that half of it is never taken for a whole one.

    A file that cannot be deleted is a warning; what is left is hidden.
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
        warnings.warn(f"{path}: could not be deleted: {error.strerror or error}", stacklevel=2)


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder, to the disk: they outlive a power cut. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """All files below a folder, and their names, to the disk. Raises OSError."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def read_json(path: Path) -> Any:
    """A JSON file's value; a UserError says where it is broken."""
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
    except (RecursionError, ValueError):  # a number of thousands of digits, for one
        raise UserError("nested too deep, or a number too long; the file is damaged, make it again", path) from None
