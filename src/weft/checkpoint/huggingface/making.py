"""What importing and exporting share: a folder that appears whole or not at all, and the tokenizer in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from weft.checkpoint.files import threads
from weft.config.errors import UserError
from weft.config.headers import BESIDE_TOKENIZER, read_json, read_tokenizer
from weft.config.model import ModelSection
from weft.data.conversations.template import template_doubts
from weft.data.folders import sync_entry

_SOURCES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


@contextlib.contextmanager
def new_folder(out: Path, needed: int) -> Iterator[Path]:
    """A hidden folder beside `out` that takes its name when the block ends well, and is deleted if it does not.

    Args:
        needed: bytes that will be written.

    Raises:
        UserError: `out` is there already or cannot be made, another process makes it, or the disk has no room.
    """
    if out.name in ("", ".."):
        raise UserError(f"{out}: a name is needed for what is made; such as {out / 'new'}")
    _refuse_taken(out)
    partial = out.with_name(f".{out.name}.partial")
    try:
        lock = _claim(partial, out)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror or error}; nothing was made", out) from error
    try:
        _refuse_taken(out)  # another process may have finished it just now
        for left in partial.iterdir():  # by one that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"no room on the disk: {needed:,} bytes needed, {free:,} free")
        yield partial
        for path in partial.rglob("*"):
            sync_entry(path)
        sync_entry(partial)
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
        sync_entry(out.absolute().parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"cannot be written: {error.strerror or error}; nothing was made", out) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _refuse_taken(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UserError("exists already; name another folder, or move it away", out)


def _claim(partial: Path, out: Path) -> int:
    """Make the hidden folder, or take what is there, and lock it for as long as the returned descriptor is open."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # its owner has just finished
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError("another process is making it now; wait for that, or name another folder", out) from None
        except OSError:
            pass  # a network's disk without locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(partial)):
                return lock
        os.close(lock)  # of one that its owner renamed or deleted meanwhile


_Result = TypeVar("_Result")


def in_threads(write: Callable[..., _Result], *columns: Sequence[Any], progress: Any, total: int) -> list[_Result]:
    """`write(first, second, ..., on_bytes)` for each row of `columns`, on a few threads.

    When one of them fails, or Ctrl-C ends the work, the others end at the next bytes that they tell `on_bytes` of.

    Args:
        progress: is told of the bytes of all, up to `total`.
    """
    done, ended, counting = 0, threading.Event(), threading.Lock()

    def on_bytes(count: int) -> None:
        nonlocal done
        if ended.is_set():
            raise _Ended
        with counting:
            done += count
            progress.update(min(done, total))

    with ThreadPoolExecutor(min(4, threads())) as pool:
        try:
            return list(pool.map(lambda *row: write(*row, on_bytes), *columns))
        except BaseException:
            ended.set()
            raise


class _Ended(Exception):
    """Nobody waits for this work any more."""


def tokenizer_doubts(folder: Path | None, section: ModelSection, config: Mapping[str, Any]) -> list[str]:
    """What is to be said of a model's tokenizer.

    Args:
        folder: where its files are; None if nothing is known of one.
        config: the config.json, for the special ids that it names.

    Raises:
        UserError: it is broken, or another model's: its vocabulary is larger than the embedding.
    """
    rows = section.vocab_size or 0
    if folder is not None:
        _check_beside(folder)
    doubts = []
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(key) if isinstance(config.get(key), list) else [config.get(key)]
        far = [one for one in ids if isinstance(one, int) and one >= rows]
        if far:
            doubts.append(f"{key} is {far[0]}, beyond the model's {rows:,} tokens; no text has that token")
    if folder is None or not (folder / "tokenizer.json").is_file():
        others = [name for name in _SOURCES if folder is not None and (folder / name).exists()]
        how = f"; `weft data import-tokenizer` may make one of {others[0]}" if others else ""
        return [*doubts, f"there is no tokenizer.json, so the model has no tokenizer{how}"]
    header, content = read_tokenizer(folder)
    vocabulary = content["model"]["vocab"]
    plain = max(vocabulary.values(), default=-1) + 1 if isinstance(vocabulary, dict) else len(vocabulary)
    if plain > rows:
        raise UserError(
            f"this tokenizer does not fit: it has {plain:,} tokens and the model's embedding {rows:,} rows; bring the "
            "tokenizer that the model was trained with, or take tokenizer.json away",
            folder / "tokenizer.json",
        )
    if header.vocab_size > rows:
        far = [token["content"] for token in content.get("added_tokens") or [] if token["id"] >= rows]
        named = ", ".join(far[:3]) + (f" and {len(far) - 3} more" if len(far) > 3 else "")
        doubts.append(f"the tokenizer has special tokens beyond the model's {rows:,} rows ({named}); do not use them")
    if header.eod_id is None:
        doubts.append(
            "the tokenizer states no end-of-document token (eos_token); `weft data import-tokenizer --eod` sets one"
        )
    return [*doubts, *template_doubts(folder)]


def _check_beside(folder: Path) -> None:
    """Raise UserError if one of the files beside a tokenizer and a model is damaged: it would go along."""
    for name in (*BESIDE_TOKENIZER, "chat_template.json", "generation_config.json"):
        file = folder / name
        if not file.exists():
            continue
        if file.is_file() and not file.stat().st_size:
            raise UserError("the file is empty; download it again", file)
        if not isinstance(read_json(file), dict):
            raise UserError("a mapping belongs here; the file is damaged: download it again", file)
