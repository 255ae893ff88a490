"""New folders of tensors: checkpoints and Hugging Face folders, written atomically by several threads."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.storage import FILE_BYTES, build_index, shard_names, write_shard
from weft.checkpoint.tensor_file import Entry, split_by_size, write_safetensors
from weft.data.tokenizers.copy import copy_tokenizer
from weft.errors import UserError
from weft.families.config_json import INDEX, SINGLE
from weft.files import hidden_folder, publish, refuse_existing, report_write_errors, sync_tree
from weft.observe.console import Console

SHARD_BYTES = 5_000_000_000  # per file, the default of save_pretrained
_Result = TypeVar("_Result")
OnBytes = Callable[[int], None]  # is called with the number of bytes written since the last call


@contextmanager
def new_folder(out: Path, needed: int) -> Iterator[Path]:
    """Makes a hidden folder that is renamed to `out` if the block succeeds and deleted otherwise.

    Args:
        needed: bytes that will be written.

    Raises:
        UserError: `out` exists or cannot be written, another process writes it, or the disk has too little space.
    """
    if out.name in ("", ".."):
        raise UserError(f"{out}: the folder to write needs a name; such as {out / 'new'}")
    refuse_existing(out)
    with report_write_errors(out), hidden_folder(out) as partial:
        refuse_existing(out)  # another process may have finished it just now
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"no room on the disk: {needed:,} bytes needed, {free:,} free")
        yield partial
        sync_tree(partial)
        publish(partial, out)


@contextmanager
def _written_shards(
    out: Path,
    shards: dict[str, list[Entry]],
    write: Callable[[Path, list[Entry], OnBytes], _Result],
    task: str,
    console: Console,
    warnings: Sequence[str] = (),
) -> Iterator[tuple[Path, list[_Result]]]:
    """Writes files of tensors into a new folder. Yields the folder, for further files, and each file's result."""
    total = sum(entry.bytes for shard in shards.values() for entry in shard)
    with new_folder(out, total) as folder, console.progress(total, task, unit="B") as progress:
        for warning in warnings:
            console.warning(warning)
        paths = [folder / name for name in shards]
        yield folder, run_in_threads(write, paths, list(shards.values()), progress=progress, total=total)


def write_checkpoint(
    out: Path,
    entries: Sequence[Entry],
    contents: dict[str, Any],
    tokenizer: Path | None,
    warnings: Sequence[str],
    task: str,
    console: Console,
) -> int:
    """Writes a checkpoint at step 0, without optimizer state. `out` appears by one rename, or not at all.

    Args:
        entries: the model's tensors, by their names in a checkpoint.
        contents: the JSON files: model.json, and others.
        tokenizer: a folder to copy into the checkpoint.
        warnings: printed once it is certain that `out` can be written.
        task: label of the progress bar.

    Returns:
        The number of files of tensors.

    Raises:
        UserError: `out` cannot be written.
    """
    groups = split_by_size(entries, FILE_BYTES)
    shards = dict(zip(shard_names(0, len(groups)), groups, strict=True))
    with _written_shards(out, shards, write_shard, task, console, warnings) as (folder, written):
        tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        index = build_index([chunk for _, chunks in written for chunk in chunks], tensors, {})
        contents = {files.INDEX: index, files.OPTIMIZER: None, files.STATE: {"step": 0}} | contents
        digests = {name: digest for name, (digest, _) in zip(shards, written, strict=True)}
        digests |= {name: files.write_json(folder / name, content) for name, content in contents.items()}
        files.write_checksums(folder, digests)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder / "tokenizer")
    return len(shards)


def split_into_shards(entries: Iterable[Entry], limit: int) -> dict[str, list[Entry]]:
    """Splits entries into files of at most `limit` bytes, named as by `save_pretrained`. No tensor is split."""
    groups = split_by_size(entries, limit)
    names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    return dict(zip(names if len(groups) > 1 else [SINGLE], groups, strict=True))


@contextmanager
def new_huggingface_folder(
    out: Path, shards: dict[str, list[Entry]], task: str, console: Console, warnings: Sequence[str] = ()
) -> Iterator[Path]:
    """Writes a Hugging Face folder and yields it for further files. Adds the index of several shards if missing."""

    def write(path: Path, entries: list[Entry], on_bytes: OnBytes) -> None:
        write_safetensors(path, entries, {"format": "pt"}, on_bytes)

    with _written_shards(out, shards, write, task, console, warnings) as (folder, _):
        yield folder
        if len(shards) > 1 and not (folder / INDEX).exists():
            weight_map = {entry.name: name for name, shard in shards.items() for entry in shard}
            total = sum(entry.bytes for shard in shards.values() for entry in shard)
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            files.write_json(folder / INDEX, content)


def run_in_threads(write: Callable[..., _Result], *columns: Sequence[Any], progress: Any, total: int) -> list[_Result]:
    """Calls `write(first, second, ..., on_bytes)` for each row of `columns`, on a few threads.

    If one call fails, or Ctrl-C is pressed, the others end at their next call of `on_bytes`.

    Args:
        progress: a progress bar that is updated with the bytes of all calls, up to `total`.
    """
    done, ended, lock = 0, threading.Event(), threading.Lock()

    def on_bytes(count: int) -> None:
        nonlocal done
        if ended.is_set():
            raise _Ended
        with lock:
            done += count
            progress.update(min(done, total))

    with ThreadPoolExecutor(min(4, files.threads())) as pool:
        try:
            return list(pool.map(lambda *row: write(*row, on_bytes), *columns))
        except BaseException:
            ended.set()
            raise


class _Ended(Exception):
    """The result of this thread is no longer needed."""
