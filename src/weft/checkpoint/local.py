"""Finds the local checkpoints of a run: quick ones in the memory or on a disk of the host (`checkpoint.local`).

They are in a folder of this user, `<directory>/weft-<user>/<id>`. The run directory records the folder in
`local-checkpoints.json`, so a run that starts over (`--fresh`) never finds the checkpoints of the earlier run.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
from pathlib import Path

from weft.checkpoint import checkpoint_files as files
from weft.errors import UserError
from weft.files import read_json, replace_file, report_write_errors

RECORD = "local-checkpoints.json"
KEPT = 2  # newest local checkpoints; a save that is interrupted leaves one more


def default_directory() -> Path:
    """Returns the host's memory as a folder (`/dev/shm`) if it exists and can be written, else the temporary folder."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def open_local(run: Path, directory: str | None) -> Path:
    """Returns the folder of a run's local checkpoints, and makes it if it does not exist. Only rank 0 calls it.

    Args:
        directory: the key `checkpoint.local.directory`; None: `default_directory`.

    Raises:
        UserError: the folder cannot be written, or another user owns it.
    """
    parent = (Path(directory).absolute() if directory else default_directory()) / f"weft-{os.getuid()}"
    folder = recorded_folder(run)
    if folder is None or folder.parent != parent:
        folder = parent / secrets.token_hex(8)
    with report_write_errors(folder, "set checkpoint.local.directory"):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_others(parent)
        replace_file(run / RECORD, json.dumps({"folder": str(folder)}) + "\n")  # first, so that no folder is forgotten
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def recorded_folder(run: Path) -> Path | None:
    """Returns the folder of a run's local checkpoints that earlier sessions used; None if there was no such session.

    Raises:
        UserError: the record is damaged.
    """
    if not (run / RECORD).exists():
        return None
    content = read_json(run / RECORD)
    folder = content.get("folder") if isinstance(content, dict) else None
    if not isinstance(folder, str) or not Path(folder).is_absolute():
        raise UserError("this file lists no folder; delete it to do without the local checkpoints", run / RECORD)
    return Path(folder)


def newest_local(run: Path) -> Path | None:
    """Returns the undamaged local checkpoint with the highest step, if that is above all steps in the run directory.

    Raises:
        UserError: another user owns the folder of the local checkpoints.
    """
    folder = recorded_folder(run)
    if folder is None or not folder.is_dir():
        return None
    _refuse_others(folder)
    newest = files.last_complete(folder / files.FOLDER)
    durable = [files.step_of(path) or 0 for path in files.list_checkpoints(run / files.FOLDER)]
    return newest if newest is not None and (files.step_of(newest) or 0) > max(durable, default=0) else None


def _refuse_others(folder: Path) -> None:
    """Raises UserError if other users could have written the folder."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            "other users can write this folder, so local checkpoints in it are not loaded; delete it, or set "
            "checkpoint.local.directory",
            folder,
        )
