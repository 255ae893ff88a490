"""The run directory: claimed by one run at a time, resumed or begun anew, its config saved beside its results."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.checkpoint.checkpoint_files import FOLDER, find_damage, last_complete
from weft.checkpoint.load import checkpoints
from weft.config.load import dump_yaml, read_saved
from weft.config.run import RunConfig
from weft.data.tokenizers.copy import copy_tokenizer
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.files import hidden_folder, publish, replace_file, report_write_errors
from weft.formatting import flat

# What a resumed run may differ in without a word: it changes no result.
SILENT = ("run.name", "run.directory", "log.", "checkpoint.", "samples.", "parallel.", "data.workers")
# What decides which samples a step takes, by a function of the step: a change does not begin the order anew.
ORDER, NO_ORDER = ("run.seed", "data.", "training.batch_tokens"), ("data.validation", "data.document_attention")


def claim(path: Path, *, fresh: bool) -> int:
    """Make the run directory and lock it, for as long as this process lives
    or until the lock is closed. With `fresh`, set aside what it holds.

    Returns:
        The lock's file descriptor.

    Raises:
        UserError: another process trains there, or it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot make the run directory: {error.strerror}; set run.directory", path) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(
            "another process is training in this run directory; wait for it, or give this run another run.name", path
        ) from None
    except OSError:
        pass  # a file system without locks: nothing to be known there
    if fresh:
        set_aside(path)
    return lock


def set_aside(path: Path) -> None:
    """Move what a run directory holds to `<name>.old-<n>`; nothing is deleted."""
    parts = [part for part in path.iterdir() if part.name != ".lock"]
    if not parts:
        return
    number = 1
    while (old := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    old.mkdir()
    for part in parts:
        part.rename(old / part.name)


def set_aside_damaged(path: Path) -> list[str]:
    """Rename checkpoints of a run that are later than its last undamaged one: `damaged-step-N`; nothing is deleted.

    Returns:
        A line for each.

    Raises:
        UserError: all are damaged.
    """
    found, lines = checkpoints(path), []
    if not found:
        return lines
    last = last_complete(path / FOLDER)
    if last is None:
        raise UserError("no checkpoint of this run is undamaged; bring one back from a copy, or use --fresh", path)
    for checkpoint in found[found.index(last) + 1 :]:
        damage, aside = find_damage(checkpoint), checkpoint.with_name(f"damaged-{checkpoint.name}")
        number = 1
        while aside.exists():
            number += 1
            aside = aside.with_name(f"damaged-{checkpoint.name}-{number}")
        checkpoint.rename(aside)
        what = f" ({damage.file.name}: {damage.what})" if damage is not None else ""
        lines.append(f"{checkpoint} is damaged{what}; it is now {aside.name}, and the run goes on from {last.name}")
    return lines


class RunDirectory:
    """`<run.directory>/<run.name>/` and what earlier sessions left in it.

    Attributes:
        path: the directory.
        saved: the config of the run so far as plain data, or None for a new run.
    """

    def __init__(self, path: Path, lock: int | None = None):
        self.path, self.lock = path, lock
        config_file = path / "config.yaml"
        self.saved: dict[str, Any] | None = None
        if config_file.exists() and checkpoints(path):  # one that stopped before its first checkpoint begins again
            try:
                self.saved = read_saved(config_file)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Let another run of this or another process have the directory; without a run in it, it goes."""
        if self.lock is not None:
            with suppress(OSError):
                if [part.name for part in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
            os.close(self.lock)
            self.lock = None

    def with_choices(self, config: RunConfig) -> RunConfig:
        """`config` with what Weft chose by itself when the run began."""
        if self.saved is None:
            return config
        training, before = config.training, self.saved.get("training", {})
        kept: dict[str, Any] = {}
        if training.dtype == "auto" and before.get("dtype"):
            kept["dtype"] = before["dtype"]
        if training.threads is None and before.get("threads"):
            kept["threads"] = before["threads"]
        return config.model_copy(update={"training": training.model_copy(update=kept)})

    def changes(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """What this session's config says otherwise than that of the last training: key -> before and now."""
        if self.saved is None:
            return {}
        before, now = flat(self.saved), flat(config.as_dict())
        return {
            key: (before.get(key), now.get(key))
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not key.startswith(SILENT)
        }

    def write_config(self, config: RunConfig) -> None:
        """Save the resolved config, and the tokenizer beside it, so that the directory is enough to go on from.

        Raises:
            UserError: the disk is full, or they cannot be written.
        """
        into = self.path / "tokenizer"
        with report_write_errors(self.path, "free space or set run.directory, and run the same command again"):
            replace_file(self.path / "config.yaml", dump_yaml(config))
            if config.tokenizer and not into.exists():
                with hidden_folder(into) as made:
                    copy_tokenizer(config.tokenizer, made)
                    publish(made, into)

    def tokenizer(self) -> Tokenizer | None:
        """The run's own copy of its tokenizer, if it has one."""
        path = self.path / "tokenizer"
        return Tokenizer.load(path) if path.exists() else None


def reorders(key: str) -> bool:
    """Whether a change of this key moves the boundary between samples seen and samples to come."""
    return key.startswith(ORDER) and not key.startswith(NO_ORDER)
