"""Lists and deletes the checkpoints of a run for `weft checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.load import find_checkpoint, resolve
from weft.checkpoint.run_lock import lock_run, unlock_run
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.files import remove


@dataclass(frozen=True)
class Listed:
    """A checkpoint of a run.

    Attributes:
        damage: what is wrong with its files, by their names and sizes; None: nothing.
        saved: when the save ended.
    """

    path: Path
    bytes: int
    damage: files.Damage | None
    saved: datetime


def checkpoints_folder(run: Path) -> Path:
    """Returns the folder with the checkpoints of a run. Raises UserError if the path is not a run with checkpoints."""
    folder = run if run.name == files.FOLDER else run / files.FOLDER
    if not folder.is_dir():
        raise UserError("no run with checkpoints (it has no folder checkpoints/); give a run directory", run)
    return folder


def checkpoints_at(given: str | Path) -> list[Path]:
    """Returns the checkpoint at a path, or all checkpoints of the run at a path, lowest step first.

    Raises:
        UserError: the path has no checkpoint of Weft.
    """
    newest = find_checkpoint(given)
    if is_huggingface(newest):
        raise UserError("this is a Hugging Face folder, which has no checksums; give a run or a checkpoint", newest)
    return files.list_checkpoints(newest.parent) if newest != Path(given) else [newest]


def is_checkpoint(given: str | Path) -> bool:
    """Whether a path is a checkpoint of Weft, or a run directory."""
    path = Path(given)
    names = (files.INDEX, files.CHECKSUMS, files.FOLDER)
    return files.step_of(path) is not None or any((path / name).exists() for name in names)


def newest_at(given: str | Path) -> Path:
    """Returns the checkpoint at a path, or the newest checkpoint of the run at a path.

    Raises:
        UserError: the path has no checkpoint of Weft, or the checkpoint is damaged.
    """
    checkpoints_at(given)
    return resolve(given)


def describe(checkpoint: Path) -> Listed:
    """Describes a checkpoint. Its files are not hashed."""
    size = files.total_bytes(checkpoint)
    sums = checkpoint / files.CHECKSUMS  # the last file of a save
    saved = (sums if sums.exists() else checkpoint).stat().st_mtime
    damage = files.find_damage(checkpoint, contents=False)
    return Listed(checkpoint, size, damage, datetime.fromtimestamp(saved).astimezone())


def prune_run(run: Path, keep: files.Keep, *, dry_run: bool) -> list[Path]:
    """Deletes the checkpoints of a run that `keep` does not select. The last complete checkpoint is never deleted.

    To find the last complete one, the newest checkpoints are read and hashed until one is undamaged.

    Args:
        dry_run: whether to delete nothing.

    Returns:
        The paths of the deleted checkpoints; with `dry_run`, of the checkpoints that would be deleted.

    Raises:
        UserError: a process trains in the run directory, or no checkpoint is complete.
    """
    folder = checkpoints_folder(run)
    found = files.list_checkpoints(folder)
    doomed = _surplus(run, folder, keep)
    if dry_run or not doomed:
        return doomed
    lock = lock_run(folder.parent, "use --dry-run")
    try:
        if files.list_checkpoints(folder) != found:  # hashing takes minutes, so it is repeated only then
            doomed = _surplus(run, folder, keep)
        for path in doomed:
            remove(path)
    finally:
        unlock_run(lock)
    return doomed


def _surplus(run: Path, folder: Path, keep: files.Keep) -> list[Path]:
    """Returns the checkpoints that `prune_run` deletes. Raises UserError if no checkpoint is undamaged."""
    if not files.list_checkpoints(folder):
        return []
    if (newest := files.last_complete(folder)) is None:
        raise UserError("no checkpoint of this run is complete, so none is deleted", run)
    return files.surplus(folder, keep, newest)
