"""The folders of a run's local checkpoints: quick ones in the memory or on a disk of each host (`checkpoint.local`).

They are in a folder of this user, `<directory>/weft-<user>/<id>`, on each host. The run directory records the folder in
`local-checkpoints.json`, so a run that starts over (`--fresh`) never finds the checkpoints of the earlier run. On
several hosts, each folder has what its host's ranks saved, and copies of other hosts' files (`Hosts.keepers`).
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.hosts import Hosts
from weft.checkpoint.local_record import RECORD, parent_folder, recorded
from weft.config.run import LocalSection
from weft.errors import UserError
from weft.files import remove, replace_file, report_write_errors
from weft.parallel import ranks

KEPT = 2  # newest local checkpoints; a save that is interrupted leaves one more


@dataclass(frozen=True)
class Local:
    """The local checkpoints of a run, as this rank sees them.

    Attributes:
        folder: the folder of this rank's host, with the same structure as a run directory.
    """

    folder: Path
    hosts: Hosts

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints of this host, lowest step first. They can lack files of other hosts."""
        return files.list_checkpoints(self.folder / files.FOLDER)

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, from which the run did not resume. Every rank must call it."""
        later = [path for path in self.checkpoints if (files.step_of(path) or 0) > step]
        ranks.agree(lambda: [remove(path) for path in reversed(later)] if self.hosts.leads else None)

    def clear(self) -> None:
        """Deletes all checkpoints. Every rank must call it."""
        ranks.agree(lambda: remove(self.folder) if self.hosts.leads else None)


def open_local(run: Path, section: LocalSection | None) -> Local:
    """Returns the local checkpoints of a run, and makes their folders. Every rank must call it.

    Args:
        section: the section `checkpoint.local`; None: its defaults.

    Raises:
        UserError: on all ranks: the folder of a host cannot be written, or another user owns it.
    """
    section = section or LocalSection()
    parent = ranks.agree(lambda: parent_folder(section.directory))

    def record() -> str:
        earlier = recorded(run)
        folder = parent / secrets.token_hex(8) if earlier is None else earlier.here(section.directory)
        if folder.parent != parent:
            folder = parent / secrets.token_hex(8)
        content = {"folder": str(folder), "directory": section.directory}
        with report_write_errors(run / RECORD):
            replace_file(run / RECORD, json.dumps(content) + "\n")  # first, so that no folder is forgotten
        return folder.name

    folder = parent / ranks.agree(record, only_first=True)
    ranks.agree(lambda: _make(folder))
    return Local(folder, Hosts.of_folder(folder, section.copies))


def find_local(run: Path, section: LocalSection | None) -> Local | None:
    """Returns the local checkpoints of earlier sessions; None if no host has any. Every rank must call it.

    Raises:
        UserError: on all ranks: the record is damaged, or another user owns the folder of a host.
    """
    section = section or LocalSection()
    earlier = ranks.agree(lambda: recorded(run), only_first=True)
    if earlier is None:
        return None
    folder = ranks.agree(lambda: earlier.here(section.directory))
    if not any(ranks.all_gather_object(folder.is_dir())):
        return None
    ranks.agree(lambda: _make(folder))
    return Local(folder, Hosts.of_folder(folder, section.copies))


def _make(folder: Path) -> None:
    """Makes the folder of this host, if it does not exist. Raises UserError if others could have written it."""
    with report_write_errors(folder, "set checkpoint.local.directory"):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_others(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    _refuse_others(folder)


def _refuse_others(folder: Path) -> None:
    """Raises UserError if other users could have written the folder."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            "other users can write this folder, so local checkpoints in it are not loaded; delete it, or set "
            "checkpoint.local.directory",
            folder,
        )
