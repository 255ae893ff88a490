"""Finds the checkpoints of a run in all places: its directory, local checkpoints on this host, and an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.inventory import checkpoints_at, checkpoints_folder, describe
from weft.checkpoint.local_record import RECORD as LOCAL_RECORD
from weft.checkpoint.local_record import recorded
from weft.checkpoint.remote import RECORD as STORE_RECORD
from weft.checkpoint.remote import RemoteRun, recorded_copies
from weft.errors import UserError
from weft.formatting import counted, masked

TOKENIZER = "tokenizer"  # folder in checkpoints of `weft import`, `convert` and `average`, which is not listed
RUN, LOCAL, STORE = "run", "local", "store"  # names of the places


@dataclass(frozen=True)
class Placed:
    """A checkpoint in one of the places.

    Attributes:
        path: its path, or its URL in an object store.
        saved: when the save or the upload ended; None if the store does not know it.
        state: "complete", or what it lacks.
        verify: function that reads its contents, and returns what is damaged; None if nothing is.
        unlisted: names of the files and folders in its folder that checksums.json does not list.
    """

    place: str
    path: str
    step: int
    bytes: int
    saved: datetime | None
    state: str
    verify: Callable[[], str | None]
    unlisted: Sequence[str] = ()

    @property
    def complete(self) -> bool:
        return self.state == "complete"


def is_url(given: str) -> bool:
    """Whether a run is given by the URL of its copies, such as `s3://bucket/prefix/name`."""
    return "://" in given


def checkpoints_everywhere(given: str, *, all_bytes: bool = False) -> tuple[list[Placed], list[str]]:
    """Returns the checkpoints of a run in all places, lowest step first, and why a place could not be read.

    Args:
        given: a run directory, or the URL of the run's copies (`checkpoint.remote`/<name of the run>).
        all_bytes: whether `verify` reads all bytes of copies in the store. If False, it checks their sizes.

    Raises:
        UserError: there is no run.
    """
    if is_url(given):
        remote = RemoteRun(given)
        remote.name = remote.current() or ""
        if not remote.name:
            raise UserError(f"{masked(given)}: no run has copies here; give checkpoint.remote/NAME of a run")
        return sorted(_stored(remote, all_bytes), key=lambda one: one.step), []
    run = Path(given)
    run, problems = run.parent if run.name == files.FOLDER else run, list[str]()
    local, copies = recorded(run), recorded_copies(run)
    if local is None and copies is None:
        checkpoints_folder(run)
    found = [_in_run(path) for path in files.list_checkpoints(run / files.FOLDER)]
    if local is not None:
        found += [_on_host(path) for path in local.checkpoints()]
    if copies is not None:
        try:
            found += _stored(RemoteRun(*copies), all_bytes)
        except UserError as error:
            problems.append(str(error))
    return sorted(found, key=lambda one: one.step), problems


def checkpoints_to_verify(given: str, *, all_bytes: bool) -> tuple[list[Placed], list[str]]:
    """Returns the checkpoints of a run as `checkpoints_everywhere`, or the one checkpoint at a path.

    Raises:
        UserError: the path has no checkpoint of Weft.
    """
    run = Path(given)
    if is_url(given) or (run / LOCAL_RECORD).exists() or (run / STORE_RECORD).exists():
        return checkpoints_everywhere(given, all_bytes=all_bytes)
    return [_in_run(path) for path in checkpoints_at(given)], []


def _in_run(path: Path) -> Placed:
    found = describe(path)
    state = "complete" if found.damage is None else f"damaged ({found.damage.file.name}: {found.damage.what})"

    def verify() -> str | None:
        damage = files.find_damage(path)
        return None if damage is None else f"{damage.file}: damaged checkpoint: {damage.what}"

    step, unlisted = files.step_of(path) or 0, _unlisted(path)
    return Placed(RUN, str(path), step, found.bytes, found.saved, state, verify, unlisted)


def _on_host(path: Path) -> Placed:
    """Describes a local checkpoint, of which other hosts can have files that this host does not have."""
    found, listed = describe(path), files.read_checksums(path)
    here = [] if isinstance(listed, files.Damage) else [name for name in listed if (path / name).exists()]
    state = "complete"
    if isinstance(listed, files.Damage):
        state = f"damaged ({listed.file.name}: {listed.what})"
    elif len(here) < len(listed):
        state = f"{len(here)} of {counted(len(listed), 'file')} are on this host"
    elif found.damage is not None:
        state = f"damaged ({found.damage.file.name}: {found.damage.what})"

    def verify() -> str | None:
        damage = files.find_damage(path, only=here)
        return None if damage is None else f"{damage.file}: damaged local checkpoint: {damage.what}"

    step, unlisted = files.step_of(path) or 0, _unlisted(path)
    return Placed(LOCAL, str(path), step, found.bytes, found.saved, state, verify, unlisted)


def _unlisted(path: Path) -> list[str]:
    """Returns the names in a checkpoint's folder that checksums.json does not list; [] if checksums.json is damaged."""
    listed = files.read_checksums(path)
    if isinstance(listed, files.Damage):
        return []
    known = {*listed, files.CHECKSUMS, TOKENIZER}
    return sorted(one.name for one in path.iterdir() if one.name not in known)


def _stored(remote: RemoteRun, all_bytes: bool) -> Iterator[Placed]:
    for step, complete in remote.uploads().items():
        where = f"{masked(remote.url)}/{remote.name}/{files.checkpoint_name(step)}"
        if not complete:
            yield Placed(STORE, where, step, 0, None, "an incomplete upload, which is not used", lambda: None)
            continue
        size, saved = remote.describe(step)

        def verify(step: int = step, where: str = where) -> str | None:
            damage = remote.find_damage(step, contents=all_bytes)
            return None if damage is None else f"{where}: damaged copy: {damage}"

        yield Placed(STORE, where, step, size, saved, "complete", verify)
