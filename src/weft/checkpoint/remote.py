"""Copies of checkpoints in an object store (`checkpoint.remote`), through fsspec.

URL is `checkpoint.remote`/<name of the run>. `URL/current.json` names the folder of the run, `URL/<id>/`, so that a run
that starts over (`--fresh`) never finds the checkpoints of the earlier run, which stay. A checkpoint is
`URL/<id>/step-%08d/`. Its object `complete.json` is written last and deleted first: without it, a checkpoint is an
incomplete upload, which is never used. Beside the checkpoints are copies of the small files of the run directory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.best import RECORD as BEST
from weft.errors import UserError
from weft.files import hidden_folder, publish, read_json, replace_file, sync_tree
from weft.formatting import masked

RECORD = "remote-checkpoints.json"
CURRENT, COMPLETE = "current.json", "complete.json"
# Small files of a run directory that another host needs to continue the run.
SIDE_FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "samples.jsonl")
SIDE_FOLDERS = ("tokenizer",)
TRIES, FIRST_WAIT = 5, 1.0  # attempts of an operation, and seconds before the second one; each further wait is doubled
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of a disk, which waiting does not mend
log = logging.getLogger("weft.train")
Result = TypeVar("Result")


class DamagedCopy(UserError):
    """A copy of a checkpoint is damaged, which does not concern older copies."""


class RemoteRun:
    """The checkpoints of a run in an object store. Every operation is tried several times.

    Args:
        url: URL of any store that fsspec knows, such as `s3://bucket/prefix`.
        name: id of the run's folder.

    Raises:
        UserError: no library for this kind of URL is installed, or the URL is wrong.
    """

    def __init__(self, url: str, name: str = ""):
        import fsspec

        self.url, self.name = url.rstrip("/"), name
        where = f"checkpoint.remote: {masked(url)}"
        if not all(self.url.partition("://")):
            raise UserError(f"{where} is no URL; use one such as s3://bucket/prefix")
        try:
            self.store, self.root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
            self._is_folder = hasattr(self.store, "auto_mkdir")
            if self._is_folder:
                self.store.auto_mkdir = True
        except ImportError as error:
            raise UserError(f"checkpoint.remote: {error}; for s3:// run `pip install 'weft-train[remote]'`") from None
        except (ValueError, OSError) as error:
            raise UserError(f"{where}: {error}; use a URL such as s3://bucket/prefix") from None

    def _path(self, *names: str) -> str:
        return "/".join((self.root, self.name, *names))

    def current(self) -> str | None:
        """Returns the id of the run that was begun last at this URL; None if there is none.

        Raises:
            UserError: the store cannot be read.
        """
        path = f"{self.root}/{CURRENT}"
        content = self._reads(lambda: json.loads(self.store.cat_file(path)) if _exists(self.store, path) else {})
        found = content.get("run") if isinstance(content, dict) else None
        return found if isinstance(found, str) and found.isalnum() else None

    def begin(self) -> None:
        """Makes this run the one that other hosts find. Raises UserError if the store cannot be written."""
        content = json.dumps({"run": self.name}).encode()
        self._reads(lambda: self._write(f"{self.root}/{CURRENT}", content))

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, the lowest first. Raises UserError if the store cannot be read."""
        return [step for step, complete in self.uploads().items() if complete]

    def uploads(self) -> dict[int, bool]:
        """Returns whether each checkpoint, the lowest step first, is complete. Raises UserError as `steps`."""

        def find() -> dict[int, bool]:
            self.store.invalidate_cache()
            if not _exists(self.store, self._path()):
                return {}
            found = [Path(str(one).rstrip("/")) for one in self.store.ls(self._path(), detail=False)]
            steps = sorted(step for one in found if (step := files.step_of(one)) is not None)
            return {step: _exists(self.store, self._of(step, COMPLETE)) for step in steps}

        return self._reads(find)

    def _of(self, step: int, *names: str) -> str:
        return self._path(files.checkpoint_name(step), *names)

    def upload(self, checkpoint: Path, run: Path) -> None:
        """Copies a checkpoint and the small files of the run directory, which replace earlier ones.

        The small files come before the marker of completeness: a host that continues has the metrics of all steps.

        Raises:
            FileNotFoundError: the checkpoint was deleted meanwhile.
            Exception: an operation of the store failed in its last attempt.
        """
        step = files.step_of(checkpoint)
        assert step is not None
        sizes = {file.name: file.stat().st_size for file in sorted(checkpoint.iterdir()) if file.is_file()}
        self._remove_marker(step)
        for name, size in sizes.items():
            self._attempt(lambda name=name, size=size: self._put(checkpoint / name, self._of(step, name), size))
        self.upload_side_files(run)
        self._attempt(lambda: self._write(self._of(step, COMPLETE), json.dumps({"files": sizes}).encode()))

    def _write(self, target: str, content: bytes) -> None:
        """Writes a small object. A kill leaves the old one or the new one, also in a store that is a folder."""
        if not self._is_folder:
            return self.store.pipe_file(target, content)
        partial = self._path(".partial")
        self.store.pipe_file(partial, content)
        self.store.mv(partial, target)
        return None

    def _put(self, source: Path, target: str, size: int) -> None:
        self.store.put_file(str(source), target)  # in several parts where it is large
        self.store.invalidate_cache()
        if (found := self.store.info(target)["size"]) != size:
            raise OSError(f"{target} has {found:,} bytes in the store instead of {size:,}")

    def upload_side_files(self, run: Path) -> None:
        """Copies the small files of the run directory. Raises what the store raises in the last attempt."""
        found = [run / name for name in SIDE_FILES] + [run / files.FOLDER / BEST]
        found += [file for folder in SIDE_FOLDERS for file in sorted((run / folder).rglob("*"))]
        for file in found:
            if file.is_file():
                target = self._path("run", file.relative_to(run).as_posix())
                content = file.read_bytes()  # a file that grows meanwhile
                self._attempt(lambda target=target, content=content: self._write(target, content))

    def delete(self, steps: Iterable[int]) -> None:
        """Deletes checkpoints. Raises what the store raises in the last attempt."""
        for step in steps:
            self._remove_marker(step)
            self._attempt(lambda step=step: self.store.rm(self._of(step), recursive=True))

    def delete_incomplete(self) -> None:
        """Deletes incomplete uploads, which kills left. Not while one is in progress. Raises as `delete`."""
        self.delete(step for step, complete in self.uploads().items() if not complete)
        if hasattr(self.store, "list_multipart_uploads"):  # S3 keeps, and bills, the parts of a killed upload
            bucket, _, prefix = self._path().partition("/")
            for one in self._attempt(lambda: self.store.list_multipart_uploads(bucket)):
                if one["Key"].startswith(prefix):
                    names = {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
                    self._attempt(lambda names=names: self.store.call_s3("abort_multipart_upload", **names))

    def describe(self, step: int) -> tuple[int, datetime | None]:
        """Returns the bytes of a complete checkpoint, and when its upload ended, if the store knows that.

        Raises:
            UserError: the store cannot be read.
        """
        marker, saved = self._of(step, COMPLETE), None
        with suppress(NotImplementedError, KeyError, FileNotFoundError):
            saved = self.store.modified(marker).astimezone()
        return sum(self._sizes(step).values()), saved

    def find_damage(self, step: int, *, contents: bool) -> str | None:
        """Returns what is wrong with a complete checkpoint, and in which object; None if nothing is.

        Args:
            contents: whether to read all objects. If False, only their sizes are checked.

        Raises:
            UserError: the store cannot be read.
        """
        self.store.invalidate_cache()
        for name, size in self._sizes(step).items():
            path = self._of(step, name)
            found = self._reads(lambda path=path: self.store.info(path)["size"] if _exists(self.store, path) else None)
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                return f"{name}: the object {what}"
        if not contents:
            return None
        listed = self._reads(lambda: self.store.cat_file(self._of(step, files.CHECKSUMS)))
        try:
            digests = files.parse_checksums(listed)
        except (ValueError, KeyError, TypeError, AttributeError):
            digests = None
        if digests is None:
            return f"{files.CHECKSUMS}: the object is not what was written"
        for name, digest in digests.items():
            if self._reads(lambda name=name: self._sha256(self._of(step, name))) != digest.sha256:
                return f"{name}: the contents of the object differ from what was written (SHA-256)"
        return None

    def _sha256(self, path: str) -> str:
        with self.store.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _sizes(self, step: int) -> dict[str, int]:
        """Returns name -> bytes of the files of a complete checkpoint. Raises DamagedCopy if the list is damaged."""
        marker = self._of(step, COMPLETE)
        content = self._reads(lambda: self.store.cat_file(marker))
        try:
            return {name: int(size) for name, size in json.loads(content)["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedCopy(f"damaged checkpoint: {masked(marker)} lists no files; delete this copy") from None

    def _remove_marker(self, step: int) -> None:
        path = self._of(step, COMPLETE)
        self._attempt(lambda: self.store.rm_file(path) if _exists(self.store, path) else None)

    def download(self, step: int, run: Path) -> Path:
        """Copies a checkpoint to a run directory, and verifies it.

        Raises:
            DamagedCopy: the checkpoint is damaged.
            UserError: the store cannot be read.
        """
        target = run / files.FOLDER / files.checkpoint_name(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        sizes = self._sizes(step)
        with hidden_folder(target) as partial:
            for name in sizes:
                if Path(name).name != name:
                    marker = masked(self._of(step, COMPLETE))
                    raise DamagedCopy(f"{marker} lists {name!r}, which is outside; do not use it")
                self._reads(lambda name=name: self.store.get_file(self._of(step, name), str(partial / name)), target)
            if (damage := files.find_damage(partial)) is not None:
                raise DamagedCopy(f"damaged checkpoint: {damage.file.name}: {damage.what}", Path(self._of(step)))
            sync_tree(partial)
            publish(partial, target)
        return target

    def download_side_files(self, run: Path) -> None:
        """Copies the small files of the run that the run directory does not have. Raises UserError if that fails."""
        prefix = self._path("run")
        for path in self._reads(lambda: self.store.find(prefix) if _exists(self.store, prefix) else []):
            name = str(path).partition(f"/{self.name}/run/")[2]  # a folder of the URL can have the name "run", too
            target = run / name
            if ".." not in Path(name).parts and run.resolve() in target.resolve().parents and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                replace_file(target, self._reads(lambda path=path: self.store.cat_file(path)))

    def _reads(self, action: Callable[[], Result], target: Path | None = None) -> Result:
        try:
            return self._attempt(action)
        except Exception as error:  # of any library
            if target is not None and isinstance(error, OSError) and error.errno in NO_ROOM:
                what = f"cannot be written: {error.strerror}; free space and run the same command again"
                raise UserError(what, target) from error
            kind = DamagedCopy if isinstance(error, FileNotFoundError) else UserError
            where = f"checkpoint.remote: {masked(self.url)}"
            raise kind(f"{where}: {reason(error)}; check the URL and the credentials") from error

    def _attempt(self, action: Callable[[], Result]) -> Result:
        for number in range(TRIES):
            try:
                return action()
            except Exception as error:  # of any library
                lasts = isinstance(error, FileNotFoundError | PermissionError) or getattr(error, "errno", 0) in NO_ROOM
                if number == TRIES - 1 or lasts:
                    raise
                log.info("%s: %s; trying again", masked(self.url), reason(error))
                time.sleep(FIRST_WAIT * 2**number)
        raise AssertionError


def _exists(store: Any, path: str) -> bool:
    """Whether an object or a folder exists. (`exists` of many stores also returns False if the request failed.)"""
    try:
        store.info(path)
    except FileNotFoundError:
        return False
    return True


def reason(error: Exception) -> str:
    """Returns the kind and the text of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def open_remote(run: Path, url: str, *, fresh: bool) -> tuple[RemoteRun, str | None]:
    """Finds or begins the run at a URL, and downloads its newest checkpoint if the run directory has no newer one.

    Only the first rank calls it, and before it reads the run directory. A damaged checkpoint in the store is skipped.

    Args:
        fresh: whether the run starts over.

    Returns:
        The remote run, and a message about what was downloaded; None if nothing was.

    Raises:
        UserError: the store cannot be read or written, or all its checkpoints are damaged.
    """
    local = [files.step_of(path) or 0 for path in files.list_checkpoints(run / files.FOLDER)]
    remote = RemoteRun(url)
    recorded = recorded_copies(run)
    known = recorded[1] if recorded is not None and recorded[0] == remote.url else None
    if known is None and not fresh and not local:
        known = remote.current()
    if known is None or fresh:
        remote.name = secrets.token_hex(8)
        remote.begin()
    else:
        remote.name = known
    replace_file(run / RECORD, json.dumps({"url": remote.url, "run": remote.name}) + "\n")
    if known is None or fresh:
        return remote, None
    newer, problems = [step for step in remote.steps() if step > max(local, default=0)], []
    for step in reversed(newer):
        try:
            path = remote.download(step, run)
        except DamagedCopy as error:
            problems.append(str(error))
            continue
        remote.download_side_files(run)
        return remote, "; ".join([f"downloaded {path.name} from {masked(remote.url)}", *problems])
    if problems and not local:
        raise UserError(f"checkpoint.remote: no checkpoint in the store is undamaged: {problems[0]}; use --fresh")
    return remote, "; ".join(problems) or None


def recorded_copies(run: Path) -> tuple[str, str] | None:
    """Returns URL and id of the copies of a run, as its directory records them; None if it has none.

    Raises:
        UserError: the record is damaged.
    """
    if not (run / RECORD).exists():
        return None
    content = read_json(run / RECORD)
    url, name = (content.get("url"), content.get("run")) if isinstance(content, dict) else (None, None)
    return (url, name) if isinstance(url, str) and isinstance(name, str) and name.isalnum() else None
