"""Computes digests of files, and remembers them while the files do not change."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from weft.errors import UserError
from weft.files import replace_file
from weft.observe.console import Console

BLOCK = 1 << 22  # bytes that are read at a time
SHOWN = 1 << 28  # bytes, read in less than a second; the progress of more is shown
SETTLED = 2.0  # seconds: a later change of a file may not change its time, if the clock of the file system is coarse


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


def file_digests(files: Sequence[Path], stamps: list[list[int]], memory: Path, console: Console) -> list[str]:
    """Returns the sha256 of each file.

    Args:
        stamps: result of `file_stamps(files)`.
        memory: folder in which digests are remembered. A digest is used again if the stamp of its file is unchanged.

    Raises:
        UserError: a file cannot be read.
    """
    names = [os.path.realpath(path) for path in files]
    place = memory / f"{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:32]}.json"
    known: dict[str, list] = {}
    with suppress(OSError, ValueError):
        known = json.loads(place.read_bytes())
    missing = [n for n, name in enumerate(names) if (known.get(name) or [None])[0] != stamps[n]]
    if not missing:
        return [known[name][1] for name in names]
    began, done, computed = time.time(), 0, {}
    size = sum(stamps[n][0] for n in missing)
    console = console if size > SHOWN else Console(prints=False)
    with console.progress(size, "reading", unit="B") as bar:
        for n in missing:
            digest = hashlib.sha256()
            try:
                with open(files[n], "rb", buffering=0) as file:
                    while block := file.read(BLOCK):
                        digest.update(block)
                        done += len(block)
                        bar.update(done)
            except OSError as error:
                what = f"cannot be read: {error.strerror}; check the file and its permissions"
                raise UserError(what, files[n]) from None
            computed[n] = digest.hexdigest()
    result = [computed.get(n) or known[name][1] for n, name in enumerate(names)]
    settled = {
        name: [stamp, digest]
        for name, stamp, digest in zip(names, stamps, result, strict=True)
        if max(stamp[1:3]) / 1e9 < began - SETTLED
    }
    with suppress(OSError):  # without the memory, the files are read again
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, json.dumps(settled), durable=False)
    return result
