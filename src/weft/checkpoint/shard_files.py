"""Writes new checkpoints and Hugging Face folders, atomically and with several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from weft.files import hidden_folder, publish, refuse_existing, report_write_errors, require_space, sync_tree
from weft.observe.console import Console

SHARD_BYTES = 5_000_000_000  # maximum bytes of a file, the default of save_pretrained
_Result = TypeVar("_Result")
OnBytes = Callable[[int], None]  # receives the number of bytes written since its last call


@contextmanager
def new_folder(out: Path, needed: int) -> Iterator[Path]:
    """Context manager that makes and yields a hidden folder.

    If the `with` block succeeds, the folder is renamed to `out`. If the block raises, the folder is deleted.

    Args:
        needed: number of bytes that will be written.

    Raises:
        UserError: `out` exists (and is not an empty folder) or cannot be written, another process writes `out`, or the
            disk has too little space.
    """
    if out.name in ("", ".."):
        raise UserError(f"{out}: the output folder needs a name; use, for example, {out / 'new'}")
    refuse_existing(out)
    with report_write_errors(out), hidden_folder(out) as partial:
        refuse_existing(out)  # another process may have just written `out`
        require_space(partial, needed)
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
    """Context manager that writes files of tensors into a new folder.

    It yields the folder, under its hidden name, so that the block can add files; and the result of `write` for each
    file.

    Args:
        out: the new folder.
        shards: file name -> tensors of the file.
        write: function that writes one file.
        task: label of the progress bar.
        warnings: texts to print, after the check that `out` can be written.
    """
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
    *,
    tied: Mapping[str, str] | None = None,
) -> int:
    """Writes a checkpoint. `out` appears only when it is complete.

    Args:
        entries: the model's tensors, with their names in the checkpoint.
        contents: name -> JSON value of further files, with at least model.json. Without optimizer.json and state.json,
            the checkpoint has no optimizer state and is of step 0.
        tokenizer: a tokenizer's folder, which is copied into the checkpoint.
        warnings: texts to print, after the check that `out` can be written.
        task: label of the progress bar.
        tied: further name of a tied weight -> the name under which the tensor is saved.

    Returns:
        The number of files with tensors.

    Raises:
        UserError: `out` cannot be written.
    """
    groups = split_by_size(entries, FILE_BYTES)
    shards = dict(zip(shard_names(0, len(groups)), groups, strict=True))
    with _written_shards(out, shards, write_shard, task, console, warnings) as (folder, written):
        tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        index = build_index([chunk for _, chunks in written for chunk in chunks], tensors, tied or {})
        contents = {files.INDEX: index, files.OPTIMIZER: None, files.STATE: {"step": 0}} | contents
        digests = {name: digest for name, (digest, _) in zip(shards, written, strict=True)}
        digests |= {name: files.write_json(folder / name, content) for name, content in contents.items()}
        files.write_checksums(folder, digests)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder / "tokenizer")
    return len(shards)


def split_into_shards(entries: Iterable[Entry], limit: int) -> dict[str, list[Entry]]:
    """Assigns entries to files of at most `limit` bytes. The file names are as in `save_pretrained`.

    No tensor is split, so a tensor of more than `limit` bytes gets a larger file of its own.
    """
    groups = split_by_size(entries, limit)
    names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    return dict(zip(names if len(groups) > 1 else [SINGLE], groups, strict=True))


@contextmanager
def new_huggingface_folder(
    out: Path, shards: dict[str, list[Entry]], task: str, console: Console, warnings: Sequence[str] = ()
) -> Iterator[Path]:
    """Context manager that writes the tensors of a Hugging Face folder.

    It yields the folder, so that the `with` block can add files.

    If the tensors are in several files and the block writes no index, an index is added.

    Args:
        shards: file name -> tensors of the file.
    """

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
    """Calls `write(*arguments, on_bytes)` for each tuple `arguments` of `zip(*columns)`, on up to 4 threads.

    Returns the results in order. If one call fails, or Ctrl-C is pressed, the other calls end the next time that they
    call `on_bytes`.

    Args:
        columns: the first arguments of all calls, the second arguments of all calls, and so on.
        progress: a progress bar, which is updated with the bytes of all calls, up to `total`.
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
    """Raised in a thread whose result is no longer needed, because another thread failed."""
