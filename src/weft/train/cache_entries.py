"""Names and locks the entries of the user's cache that runs with frozen models compute before training."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from weft.config.run import RunConfig
from weft.data.sequences.packed import PackedDataset
from weft.data.sequences.windows import StoreDataset
from weft.errors import UserError
from weft.files import cache_folder, lock_exclusively
from weft.observe.status import LONG, doing
from weft.train.job import Job

T = TypeVar("T")


def entry_path(kind: str, config: RunConfig, dataset: PackedDataset | StoreDataset, content: list[Any]) -> Path:
    """Returns the path of the entry for a dataset, without an extension. The entry may not exist.

    Args:
        kind: name of the folder in the cache.
        content: JSON values on which the entry depends besides the samples of the dataset.
    """
    data = config.data
    samples = [dataset.store.info.identity, dataset.length, data.packing, data.document_attention]
    if isinstance(dataset, PackedDataset):  # these decide which documents are left out, too
        samples += [dataset.whole, dataset.last_tokens]
    key = json.dumps([samples, content], sort_keys=True)
    return cache_folder() / kind / hashlib.sha256(key.encode()).hexdigest()[:32]


def read_or_lock(job: Job, path: Path, read: Callable[[], T | None], lock: ExitStack) -> T | None:
    """Returns an entry; or None, if this run must compute it and has its lock. Every rank must call it.

    Waits while another run computes the entry. Rank 0 holds the lock.

    Args:
        read: function that returns the entry on all ranks, or None on all ranks; every rank calls it.
        lock: unlocks the entry when it is closed.

    Raises:
        UserError: the cache cannot be written.
    """

    def try_lock() -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise unwritable(error, path) from None
        lock.callback(os.close, handle)
        try:
            lock_exclusively(handle, "another run computes this entry", path)
        except UserError:
            return False
        return True

    while (found := read()) is None:
        if job.world.agree(try_lock, only_first=True):
            return read()  # another run may have finished in between
        doing("waiting for another run that computes the same values", "cache", LONG)
        lock.close()
        time.sleep(1)
    return found


def unwritable(error: OSError, path: Path) -> UserError:
    """Returns the error of an entry that cannot be written."""
    what = f"cannot be written: {error.strerror}; free space, or set WEFT_CACHE to another folder"
    return UserError(what, path.parent)
