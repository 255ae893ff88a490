"""Folders that appear whole: they are made in a hidden one beside, and take their name by one rename."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def partial_folder(out: Path) -> Path:
    """Where `out` is made: hidden, and on the same disk."""
    return out.with_name(f".{out.name}.partial")


def sync(folder: Path) -> None:
    """All files of a folder, and their names, to the disk."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def publish(made: Path, out: Path) -> None:
    """Give a finished folder its name, in place of what is there. Afterwards it is on the disk, whatever happens."""
    sync(made)
    old = out.with_name(f".{out.name}.old")
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    made.rename(out)
    handle = os.open(out.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    shutil.rmtree(old, ignore_errors=True)  # also what a kill between two renames left
