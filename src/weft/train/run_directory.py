"""Defines `RunDirectory`, and functions that lock a run directory and move old or damaged content aside."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.checkpoint.checkpoint_files import FOLDER, find_damage, last_complete
from weft.checkpoint.load import checkpoints
from weft.checkpoint.local_record import recorded
from weft.checkpoint.run_lock import LOCK, lock_run, unlock_run
from weft.config.dump import dump_yaml, read_saved
from weft.config.run import RunConfig
from weft.data.conversations.template import find_template, has_template
from weft.data.option_names import RUN_FILE
from weft.data.tokenizers.copy import copy_tokenizer
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.files import hidden_folder, publish, replace_file, report_write_errors
from weft.formatting import counted, flat
from weft.headers import read_store_header
from weft.observe.manifest import read_manifest

# Keys that do not affect results: a resumed run can change them without a warning.
SILENT = (
    "run.name",
    "run.directory",
    "log.",
    "watch.",
    "checkpoint.",
    "samples.",
    "parallel.",
    "data.workers",
    "training.threads",
    "training.determinism",
    "training.hang_timeout",
)
LOSSY = "parallel.compress"
# Keys that change how the same training is computed, what is measured, and paths whose content is checked elsewhere. A
# change is reported, and needs no acceptance.
SAME_TRAINING = (
    "validation.",
    "data.validation",
    "training.compile",
    "training.micro_batch_size",
    "training.activation_checkpointing",
    "model.attention_implementation",
    "model.from",
    "adapter.from",
    "tokenizer",
)
# Keys without meaning in a session whose batches the user's own loop passes.
OF_READ_BATCHES = ("data.train", "data.length_warmup", "training.batch_tokens")
LENGTH = ("training.steps", "training.tokens", "training.epochs")
# Keys that decide which samples a step takes. After a change the new order continues at the same step.
ORDER, NO_ORDER = ("run.seed", "data.", "training.batch_tokens"), ("data.validation", "data.document_attention")


def claim(path: Path, *, fresh: bool) -> int:
    """Creates the run directory and locks it until this process ends or closes the lock.

    Args:
        fresh: whether to move the content of the directory aside.

    Returns:
        The file descriptor of the lock.

    Raises:
        UserError: another process trains in the directory, or the directory cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the run directory cannot be created: {error.strerror}; set run.directory", path) from None
    lock = lock_run(path, "give this run another run.name")
    if fresh:
        set_aside(path)
    return lock


def warn_of_other_writers(path: Path) -> str | None:
    """Returns a warning if other users own or can change a run directory, from which a run reads its checkpoints."""
    found = path.stat()
    if found.st_uid != os.getuid():
        owner = f"belongs to another user (uid {found.st_uid}), who can change the checkpoints of this run"
        return f"{path} {owner}; set run.directory"
    if found.st_mode & 0o002:
        return f"{path} can be changed by all users of this host; protect it: chmod o-w {path}"
    return None


def set_aside(path: Path) -> None:
    """Moves the content of a run directory to `<name>.old-<n>`. Nothing is deleted."""
    content = [entry for entry in path.iterdir() if entry.name != LOCK]
    if not content:
        return
    names = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
    old = next(name for name in names if not name.exists())
    old.mkdir()
    for entry in content:
        entry.rename(old / entry.name)


def set_aside_damaged(path: Path) -> list[str]:
    """Renames the checkpoints after the last undamaged checkpoint to `damaged-step-N`. Nothing is deleted.

    Returns:
        A message for each renamed checkpoint.

    Raises:
        UserError: all checkpoints are damaged.
    """
    found, lines = checkpoints(path), []
    if not found:
        return lines
    last = last_complete(path / FOLDER)
    if last is None:
        raise UserError(
            "all checkpoints of this run are damaged; restore a checkpoint from a copy, or use --fresh", path
        )
    for checkpoint in found[found.index(last) + 1 :]:
        damage = find_damage(checkpoint)
        suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        names = (checkpoint.with_name(f"damaged-{checkpoint.name}{suffix}") for suffix in suffixes)
        aside = next(name for name in names if not name.exists())
        checkpoint.rename(aside)
        what = f" ({damage.file.name}: {damage.what})" if damage is not None else ""
        lines.append(f"{checkpoint} is damaged{what}; renamed to {aside.name}; the run resumes from {last.name}")
    return lines


class RunDirectory:
    """The directory of a run, `<run.directory>/<run.name>/`.

    Attributes:
        saved: the config of the last session as plain data; None for a run without a checkpoint.
    """

    def __init__(self, path: Path, lock: int | None = None):
        self.path, self.lock = path, lock
        config_file = path / "config.yaml"
        self.saved: dict[str, Any] | None = None
        try:
            if config_file.exists() and (checkpoints(path) or recorded(path)):  # a run without a checkpoint starts over
                self.saved = read_saved(config_file)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlocks the directory, and removes the directory if it is empty."""
        if self.lock is not None:
            with suppress(OSError):
                if [entry.name for entry in self.path.iterdir()] == [LOCK]:
                    (self.path / LOCK).unlink()
                    self.path.rmdir()
            unlock_run(self.lock)
            self.lock = None

    def with_dtype(self, config: RunConfig) -> RunConfig:
        """Returns `config` with the last session's dtype in place of `dtype: auto`."""
        training, before = config.training, (self.saved or {}).get("training", {}).get("dtype")
        if training.dtype != "auto" or not before:
            return config
        return config.model_copy(update={"training": training.model_copy(update={"dtype": before})})

    def kept_reduction(self, mesh: Mapping[str, int]) -> str | None:
        """Returns when the last session reduced gradients (`last` or `every`), if Weft chose it; None on another mesh.

        On another mesh, sums round differently anyway, and the memory that is needed is another.

        Args:
            mesh: sizes of the mesh axes.

        Raises:
            UserError: the manifest cannot be read.
        """
        manifest = read_manifest(self.path)
        return manifest.get("reduce_gradients") if manifest.get("mesh") == dict(mesh) else None

    def changes(self, config: RunConfig, digests: Mapping[str, str] | None = None) -> dict[str, tuple[Any, Any]]:
        """Finds the config keys that affect results and whose values changed since the last session.

        Args:
            digests: digests of the data, by the names of `Data.digests`. With them, data are compared by content, not
                by path.

        Returns:
            Key -> (old value, new value). The key of data with another content is such as `data.train/NAME (content)`.
        """
        if self.saved is None:
            return {}
        before, now = flat(self.saved), flat(config.as_dict())
        # A key that the saved config lacks is null, or newer than the version that saved the config.
        new = {key for key in now.keys() - before.keys() if config.origins.get(key, "default") == "default"}
        new |= {
            key for key in before.keys() | now.keys() if config.data.train is None and key.startswith(OF_READ_BATCHES)
        }
        found = {
            key: (before.get(key), now.get(key))
            for key in sorted((before.keys() | now.keys()) - new)
            if before.get(key) != now.get(key) and (key.startswith(LOSSY) or not key.startswith(SILENT))
        }
        old = read_manifest(self.path).get("data_digests", {}) if digests else {}
        for name, digest in (digests or {}).items():
            key = f"data.{name.partition('/')[0]}"
            if old.get(name) == digest:
                if isinstance(now.get(key), str):  # the same content in another place
                    found.pop(key, None)
            elif name in old and key not in found:
                found[f"data.{name} (content)"] = old[name][:12], digest[:12]
        return found

    def raise_unless_accepted(self, changes: Mapping[str, Any], step: int, accepted: bool, show: Any) -> None:
        """Refuses a resumed run whose training would change, unless the user accepts the changes.

        A finished run may become longer.

        Args:
            changes: the result of `changes`.
            step: number of updates of earlier sessions.
            accepted: whether the user accepts changes.
            show: function that prints a line about each change, before the error.

        Raises:
            UserError: a change alters the training, and `accepted` is false.
        """
        finished = read_manifest(self.path).get("steps") == step
        altering = [
            key for key in changes if not key.startswith(SAME_TRAINING) and not (finished and key.startswith(LENGTH))
        ]
        if accepted or not altering:
            return
        for key in altering:
            show(f"changed since the run last trained: {key}: {changes[key][0]} -> {changes[key][1]}")
        raise UserError(
            f"{counted(len(altering), 'change')} of config or data since step {step:,} would alter the training "
            f"({', '.join(altering)}); restore the old values, or use --accept-changes to continue with the new ones, "
            "or --fresh to start over",
            self.path,
        )

    def nothing_to_do(self, step: int, steps: int) -> str:
        """Returns the message for a run that has already made all its steps.

        Args:
            step: number of steps that the run has made.
            steps: length of the run according to its config.
        """
        where = "finished" if step == steps else "past its length"
        return (
            f"{self.path}: this run is {where}: it has made {counted(step, 'step')}, and its length is {steps:,}; "
            "nothing to do; raise training.steps to continue, or use --fresh to start over"
        )

    def write_config(self, config: RunConfig) -> None:
        """Saves the resolved config and the tokenizer, so that the run can be resumed from the directory alone.

        The chat template of the training data becomes the tokenizer's, so that the run is chatted with as it was
        trained.

        Raises:
            UserError: the files cannot be written.
        """
        into = self.path / "tokenizer"
        with report_write_errors(self.path, "free space or set run.directory, and run the same command again"):
            replace_file(self.path / "config.yaml", dump_yaml(config))
            if config.tokenizer:  # copied in each session, because it may have changed
                with hidden_folder(into) as made:
                    copy_tokenizer(config.tokenizer, made)
                    if (template := _chat_template(config, Path(config.tokenizer))) is not None:
                        (made / "chat_template.jinja").write_text(template, encoding="utf-8")
                    publish(made, into, replace=True)

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer of the run; None if the run has no tokenizer."""
        path = self.path / "tokenizer"
        return Tokenizer.load(path) if path.exists() else None


def _chat_template(config: RunConfig, tokenizer: Path) -> str | None:
    """Returns the chat template that rendered the training data; None if it is the tokenizer's, or not known."""
    if config.data.chat_template is not None:
        return find_template(tokenizer, config.data.chat_template, RUN_FILE).source
    templates = {read_store_header(store).chat_template for store in config.data.stores.values()} - {None}
    if len(templates) != 1 or (has_template(tokenizer) and find_template(tokenizer, None).source in templates):
        return None
    return templates.pop()


def unfinished_run(checkpoint: Path) -> Path | None:
    """Returns the directory of the run of a checkpoint if the run is not finished and can delete the checkpoint."""
    run = checkpoint.absolute().parent.parent
    if checkpoint.absolute().parent.name != FOLDER or not (run / "config.yaml").is_file():
        return None
    with suppress(UserError, ValueError):  # a manifest or a config that cannot be read is not this run's mistake
        sessions = read_manifest(run).get("sessions") or [{}]
        every = (read_saved(run / "config.yaml").get("checkpoint") or {}).get("keep_every")
        kept = every is not None and int(checkpoint.name.rpartition("-")[2]) % every == 0
        return None if kept or sessions[-1].get("status") == "finished" else run
    return None


def reorders(key: str) -> bool:
    """Whether a change of this config key changes which samples the remaining steps take."""
    return key.startswith(ORDER) and not key.startswith(NO_ORDER)
