"""The record of a run's local checkpoints in its run directory: where they are on each host. Needs no torch."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.checkpoint_files import FOLDER, list_checkpoints
from weft.errors import UserError
from weft.files import read_json

RECORD = "local-checkpoints.json"


@dataclass(frozen=True)
class Recorded:
    """The content of the record in the run directory.

    Attributes:
        folder: the folder on the host of the first rank.
        directory: the key `checkpoint.local.directory` of the session that made it.
    """

    folder: Path
    directory: str | None

    def here(self, directory: str | None) -> Path:
        """Returns the folder on this host, in a session with this key `checkpoint.local.directory`."""
        return parent_folder(directory) / self.folder.name if directory == self.directory else self.folder

    def checkpoints(self) -> list[Path]:
        """Returns the local checkpoints on this host, lowest step first. They can lack files of other hosts."""
        folder = self.folder
        with suppress(UserError):  # this process may lack an environment variable of the run
            folder = self.here(self.directory)
        return list_checkpoints(folder / FOLDER)


def parent_folder(directory: str | None) -> Path:
    """Returns this user's folder for local checkpoints on this host.

    Args:
        directory: the key `checkpoint.local.directory`. Default: the host's memory as a folder (`/dev/shm`) if it
            exists and can be written, else the temporary folder.

    Raises:
        UserError: the key names an environment variable that is not set.
    """
    if directory is None:
        memory = Path("/dev/shm")
        place = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    else:
        place = Path(os.path.expandvars(directory)).absolute()
        if (unset := re.search(r"\$\w+|\$\{[^}]*\}", str(place))) is not None:
            raise UserError(
                f"checkpoint.local.directory: {unset[0]} is not set on this host; set it, or change the key"
            )
    return place / f"weft-{os.getuid()}"


def recorded(run: Path) -> Recorded | None:
    """Returns the record of earlier sessions in a run directory; None if there is none.

    Raises:
        UserError: the record is damaged.
    """
    if not (run / RECORD).exists():
        return None
    content = read_json(run / RECORD)
    folder = content.get("folder") if isinstance(content, dict) else None
    if not isinstance(folder, str) or not Path(folder).is_absolute():
        raise UserError("this file lists no folder; delete it to do without the local checkpoints", run / RECORD)
    directory = content.get("directory", str(Path(folder).parent.parent))  # an older version wrote only the folder
    return Recorded(Path(folder), directory if isinstance(directory, str) else None)
