"""Copies of checkpoints in an object store (`checkpoint.remote`), through fsspec.

URL is `checkpoint.remote`/<name of the run>. `URL/current.json` names the folder of the run, `URL/<id>/`, so that a run
that starts over (`--fresh`) never finds the checkpoints of the earlier run, which stay. A checkpoint is
`URL/<id>/step-%08d/`. Its object `complete.json` is written last and deleted first: without it, a checkpoint is an
incomplete upload, which is never used. Beside the checkpoints are copies of the small files of the run directory.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.best import RECORD as BEST
from weft.checkpoint.best import read_values
from weft.errors import UserError
from weft.files import hidden_folder, publish, read_json, replace_file, sync_tree
from weft.formatting import masked

RECORD = "remote-checkpoints.json"
CURRENT, COMPLETE = "current.json", "complete.json"
# Small files of a run directory that another host needs to continue the run.
SIDE_FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "samples.jsonl")
SIDE_FOLDERS = ("tokenizer",)
TRIES, FIRST_WAIT = 5, 1.0  # attempts of an operation, and seconds before the second one; each further wait is doubled
log = logging.getLogger("weft.train")
Result = TypeVar("Result")


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
        if not all(self.url.partition("://")):
            raise UserError(f"checkpoint.remote: {masked(url)} is no URL; use one such as s3://bucket/prefix")
        try:
            self.store, self.root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
            if hasattr(self.store, "auto_mkdir"):  # of a folder
                self.store.auto_mkdir = True
        except ImportError as error:
            raise UserError(f"checkpoint.remote: {error}; for s3:// run `pip install 'weft-train[remote]'`") from None
        except (ValueError, OSError) as error:
            raise UserError(
                f"checkpoint.remote: {masked(url)}: {error}; use a URL such as s3://bucket/prefix"
            ) from None

    def _path(self, *names: str) -> str:
        return "/".join((self.root, self.name, *names))

    def current(self) -> str | None:
        """Returns the id of the run that was begun last at this URL; None if there is none.

        Raises:
            UserError: the store cannot be read.
        """
        path = f"{self.root}/{CURRENT}"
        content = self._reads(lambda: json.loads(self.store.cat_file(path)) if _exists(self.store, path) else {})
        found = content.get("run")
        return found if isinstance(found, str) and found.isalnum() else None

    def begin(self) -> None:
        """Makes this run the one that other hosts find. Raises UserError if the store cannot be written."""
        content = json.dumps({"run": self.name}).encode()
        self._reads(lambda: self.store.pipe_file(f"{self.root}/{CURRENT}", content))

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, the lowest first. Raises UserError if the store cannot be read."""

        def find() -> list[int]:
            self.store.invalidate_cache()
            if not _exists(self.store, self._path()):
                return []
            found = [Path(str(one).rstrip("/")) for one in self.store.ls(self._path(), detail=False)]
            steps = [step for one in found if (step := files.step_of(one)) is not None]
            return sorted(step for step in steps if _exists(self.store, self._of(step, COMPLETE)))

        return self._reads(find)

    def _of(self, step: int, *names: str) -> str:
        return self._path(files.checkpoint_name(step), *names)

    def upload(self, checkpoint: Path, run: Path) -> None:
        """Copies a checkpoint, and then the small files of the run directory, which replace earlier ones.

        Raises:
            FileNotFoundError: the checkpoint was deleted meanwhile.
            Exception: an operation of the store failed in its last attempt.
        """
        step = files.step_of(checkpoint)
        assert step is not None
        sizes = {file.name: file.stat().st_size for file in sorted(checkpoint.iterdir())}
        self._remove_marker(step)
        for name, size in sizes.items():
            self._attempt(lambda name=name, size=size: self._put(checkpoint / name, self._of(step, name), size))
        self._attempt(lambda: self.store.pipe_file(self._of(step, COMPLETE), json.dumps({"files": sizes}).encode()))
        self.upload_side_files(run)

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
                self._attempt(lambda target=target, content=content: self.store.pipe_file(target, content))

    def delete(self, steps: Iterable[int]) -> None:
        """Deletes checkpoints. Raises what the store raises in the last attempt."""
        for step in steps:
            self._remove_marker(step)
            self._attempt(lambda step=step: self.store.rm(self._of(step), recursive=True))

    def _remove_marker(self, step: int) -> None:
        path = self._of(step, COMPLETE)
        self._attempt(lambda: self.store.rm_file(path) if _exists(self.store, path) else None)

    def download(self, step: int, run: Path) -> Path:
        """Copies a checkpoint to a run directory, and verifies it.

        Raises:
            UserError: the checkpoint is damaged, or the store cannot be read.
        """
        target = run / files.FOLDER / files.checkpoint_name(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        sizes = self._reads(lambda: json.loads(self.store.cat_file(self._of(step, COMPLETE))))["files"]
        with hidden_folder(target) as partial:
            for name in sizes:
                if Path(name).name != name:
                    raise UserError(
                        f"{masked(self._of(step, COMPLETE))} lists {name!r}, which is outside; do not use it"
                    )
                self._reads(lambda name=name: self.store.get_file(self._of(step, name), str(partial / name)))
            if (damage := files.find_damage(partial)) is not None:
                raise UserError(f"damaged checkpoint: {damage.file.name}: {damage.what}", Path(self._of(step)))
            sync_tree(partial)
            publish(partial, target)
        return target

    def download_side_files(self, run: Path) -> None:
        """Copies the small files of the run that the run directory does not have. Raises UserError if that fails."""
        prefix = self._path("run")
        for path in self._reads(lambda: self.store.find(prefix) if _exists(self.store, prefix) else []):
            name = str(path).split("/run/", 1)[-1]
            target = run / name
            if ".." not in Path(name).parts and run.resolve() in target.resolve().parents and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                replace_file(target, self._reads(lambda path=path: self.store.cat_file(path)))

    def _reads(self, action: Callable[[], Result]) -> Result:
        try:
            return self._attempt(action)
        except Exception as error:  # of any library
            raise UserError(
                f"checkpoint.remote: {masked(self.url)}: {_reason(error)}; check the URL and the credentials"
            ) from error

    def _attempt(self, action: Callable[[], Result]) -> Result:
        for number in range(TRIES):
            try:
                return action()
            except Exception as error:  # of any library
                local = isinstance(error, FileNotFoundError | PermissionError)
                if number == TRIES - 1 or local:
                    raise
                log.info("%s: %s; trying again", masked(self.url), _reason(error))
                time.sleep(FIRST_WAIT * 2**number)
        raise AssertionError


def _exists(store: Any, path: str) -> bool:
    """Whether an object or a folder exists. (`exists` of many stores also returns False if the request failed.)"""
    try:
        store.info(path)
    except FileNotFoundError:
        return False
    return True


def _reason(error: Exception) -> str:
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
    known = _recorded(run, remote.url)
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
        except UserError as error:
            problems.append(str(error))
            continue
        remote.download_side_files(run)
        return remote, "; ".join([f"downloaded {path.name} from {masked(remote.url)}", *problems])
    if problems and not local:
        raise UserError(f"checkpoint.remote: no checkpoint in the store is undamaged: {problems[0]}; use --fresh")
    return remote, "; ".join(problems) or None


def _recorded(run: Path, url: str) -> str | None:
    if not (run / RECORD).exists():
        return None
    content = read_json(run / RECORD)
    found = content.get("run") if isinstance(content, dict) and content.get("url") == url else None
    return found if isinstance(found, str) and found.isalnum() else None


class Uploader:
    """Copies complete checkpoints to an object store in a thread, one at a time; newer ones replace those that wait.

    Args:
        remote: the run in the store.
        run: the run directory.
        keep: which checkpoints stay in the store.
    """

    def __init__(self, remote: RemoteRun, run: Path, keep: files.Keep):
        self.remote, self.run, self.keep = remote, run, keep
        self._waiting: Path | None = None
        self._thread: threading.Thread | None = None  # None once it has found that no checkpoint waits
        self._lock = threading.Lock()  # of both
        self._problem: str | None = None
        self._copied = False

    def start(self, checkpoint: Path) -> None:
        """Copies a checkpoint as soon as the one in progress is copied."""
        with self._lock:
            self._waiting = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()

    def _next(self) -> Path | None:
        with self._lock:
            checkpoint, self._waiting = self._waiting, None
            if checkpoint is None:
                self._thread = None  # `start` begins another one
            return checkpoint

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            try:
                self.remote.upload(checkpoint, self.run)
                self._problem, self._copied = None, True
                self.remote.delete(self._surplus(files.step_of(checkpoint) or 0))
            except Exception as error:  # of any library; `problem` tells it
                self._problem = _reason(error)
                if isinstance(error, FileNotFoundError) and not checkpoint.exists():
                    self._problem = f"{checkpoint.name} was deleted before it was copied; save less often, or raise "
                    self._problem += "checkpoint.keep_last"

    def _surplus(self, newest: int) -> list[int]:
        """Returns the steps to delete in the store after the upload of `newest`.

        Later ones are among them: the run did not continue from them, because they are damaged or were set aside.
        """
        found = self.remote.steps()
        steps = [step for step in found if step <= newest]
        kept = set(steps)
        with suppress(UserError):
            # The run directory of a host that continued the run does not have all checkpoints of the store.
            best = read_values(self.run / files.FOLDER).best(steps)
            kept = files.kept_steps(steps, self.keep, best) | {newest}
        return [step for step in found if step not in kept]

    def problem(self) -> str | None:
        """Returns why the last checkpoint could not be copied, once; None if it could."""
        found, self._problem = self._problem, None
        if found is None:
            return None
        return f"checkpoint.remote: the checkpoint could not be copied to {masked(self.remote.url)}: {found}"

    def finish(self) -> None:
        """Waits until the last checkpoint is copied. Raises UserError if it could not be.

        Copies the small files once more: the metrics of the last step may be written after its checkpoint.
        """
        self._join()
        if self._copied and self._problem is None:
            try:
                self.remote.upload_side_files(self.run)
            except Exception as error:  # of any library
                self._problem = _reason(error)
        if (problem := self.problem()) is not None:
            raise UserError(f"{problem}; the run directory has all checkpoints: run the same command again")

    def forget_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, after a rollback. Raises UserError if that fails."""
        with self._lock:
            self._waiting = None
        self._join()
        try:
            self.remote.delete(one for one in self.remote.steps() if one > step)
        except Exception as error:  # of any library
            raise UserError(f"checkpoint.remote: {masked(self.remote.url)}: {_reason(error)}") from error
