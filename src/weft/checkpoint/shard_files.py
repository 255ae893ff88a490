"""What importing and exporting share: a folder that appears whole or not at all, written by several threads."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.checkpoint_files import threads
from weft.checkpoint.tensor_file import Entry, cut, write_safetensors
from weft.errors import UserError
from weft.families.config_json import INDEX, SINGLE
from weft.files import hidden_folder, publish, refuse_taken, sync_tree, unwritable

SHARD_BYTES = 5_000_000_000  # of one file, as save_pretrained has it


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
    refuse_taken(out)
    with unwritable(out), hidden_folder(out) as partial:
        refuse_taken(out)  # another process may have finished it just now
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"no room on the disk: {needed:,} bytes needed, {free:,} free")
        yield partial
        sync_tree(partial)
        publish(partial, out)


def named_shards(entries: Iterable[Entry], limit: int) -> dict[str, list[Entry]]:
    """Files by the names that `save_pretrained` gives them, each of at most `limit` bytes; no tensor is divided."""
    groups = cut(entries, limit)
    several = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    return dict(zip(several if len(groups) > 1 else [SINGLE], groups, strict=True))


def write_shards(made: Path, shards: dict[str, list[Entry]], progress: Any) -> None:
    """Write safetensors files as Hugging Face has them, and the index of several unless it is there already."""

    def write(name: str, on_bytes: Callable[[int], None]) -> None:
        write_safetensors(made / name, shards[name], {"format": "pt"}, on_bytes)

    total = sum(entry.bytes for shard in shards.values() for entry in shard)
    in_threads(write, list(shards), progress=progress, total=total)
    if len(shards) > 1 and not (made / INDEX).exists():
        weight_map = {entry.name: name for name, shard in shards.items() for entry in shard}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        files.write_json(made / INDEX, content)


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
