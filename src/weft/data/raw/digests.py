"""Computes digests of files, and remembers them while the files do not change."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from weft.errors import UserError
from weft.files import recall, remember
from weft.observe.console import Console

BLOCK = 1 << 22  # bytes that are read at a time
SHOWN = 1 << 28  # bytes, read in less than a second; the progress of more is shown


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
    by_name = dict(zip(names, stamps, strict=True))
    found = recall(place, by_name)
    missing = [n for n, name in enumerate(names) if name not in found]
    if not missing:
        return [found[name] for name in names]
    began, done = time.time(), 0
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
            found[names[n]] = digest.hexdigest()
    remember(place, by_name, found, began)
    return [found[name] for name in names]
