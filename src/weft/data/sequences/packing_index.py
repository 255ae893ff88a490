"""Which documents share a sequence: made once per store and sequence length, kept beside the store, memory-mapped.

A document of n tokens gives n - 1 inputs, each with the next token as its label: its last token is only ever a label. A
document of more inputs than a sequence holds is cut into full sequences and a rest; rests are packed by best fit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.data.sequences.best_fit import Patterns, best_fit_decreasing
from weft.data.stores.indexed import map_file, release_pages
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.files import hidden_folder, publish, sync_tree
from weft.observe.console import Console

VERSION = 1
BLOCK = 1 << 22  # documents looked at together: some 200 MB


@dataclass(frozen=True)
class PackingIndex:
    """Sequences `0 .. full - 1` are pieces of long documents; the others are made of rests.

    Attributes:
        documents: of the store; unlearnable: those of at most one token, which are in no sequence.
        inputs: tokens that are not padding, in all sequences together.
        full, sequences: numbers of sequences, full pieces and all.
        long, long_firsts: documents with full pieces, and how many full pieces come before each; int64.
        order: documents with a rest, by the rest's size and then by number.
        bin_firsts: how many sequences of rests come before each pattern's, and behind the last, int64.
        patterns: as `best_fit_decreasing` gives them, but `firsts` are places in `order`.
    """

    documents: int
    unlearnable: int
    inputs: int
    full: int
    sequences: int
    long: np.ndarray
    long_firsts: np.ndarray
    order: np.ndarray
    bin_firsts: np.ndarray
    patterns: Patterns

    def documents_of(self, sequence: int, length: int) -> tuple[np.ndarray, np.ndarray, int]:
        """What a sequence holds: documents, how many inputs of each (their last ones), and, for a piece of a long
        document, which piece it is (else -1)."""
        if sequence < self.full:
            at = int(np.searchsorted(self.long_firsts, sequence, side="right")) - 1
            return self.long[at : at + 1], np.array([length]), sequence - int(self.long_firsts[at])
        number = sequence - self.full
        pattern = int(np.searchsorted(self.bin_firsts, number, side="right")) - 1
        number -= int(self.bin_firsts[pattern])
        parts = slice(*self.patterns.offsets[pattern : pattern + 2].tolist())
        repeats = self.patterns.repeats[parts]
        firsts = (self.patterns.firsts[parts] + number * repeats).tolist()
        documents = [self.order[first : first + n] for first, n in zip(firsts, repeats.tolist(), strict=True)]
        return np.concatenate(documents), np.repeat(self.patterns.sizes[parts], repeats), -1


def packing_index(store: TokenStore, length: int, console: Console | None = None) -> PackingIndex:
    """Open the store's index for sequences of `length`; make it first if there is none.

    It is written to `STORE/packing/best_fit-<length>`, or, where the store cannot be written to, below the user's cache
    folder. It appears whole, by one rename. Of several processes that ask at once, one makes it and the others wait; on
    a file system without locks each makes its own, all alike, and the first stays.

    Raises:
        UserError: there is no room for it, or nowhere to write.
    """
    name = f"best_fit-{length}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = [store.path / "packing" / name, cache / "weft" / "packing" / store.info.idx_sha256[:16] / name]
    for place in places:
        if (found := _open(place, store, length)) is not None:
            return found
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _locked(place.parent / f".{name}.lock") as alone:
                return _open(place, store, length) or _make(place, store, length, alone, console or Console(False))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or place is places[-1]:
                raise UserError(
                    f"the index of packed sequences cannot be written: {error.strerror}; make room, or set "
                    "data.packing to concatenate, which needs none",
                    place,
                ) from None
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Wait for the lock and hold it; gives False where the file system has none."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(handle)


def _open(folder: Path, store: TokenStore, length: int) -> PackingIndex | None:
    """The index in `folder`, if it is whole and this store's."""
    try:
        about = json.loads((folder / "index.json").read_bytes())
        if (about["version"], about["store"], about["length"]) != (VERSION, store.info.idx_sha256, length):
            return None
        arrays = {}
        for name, (dtype, count) in about["arrays"].items():
            file = folder / f"{name}.bin"
            if file.stat().st_size != count * np.dtype(dtype).itemsize:
                return None
            arrays[name] = map_file(file, np.dtype(dtype), 0, count)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or damaged: it is made (again)
    patterns = Patterns(*(arrays.pop(name) for name in ("bins", "offsets", "sizes", "repeats", "firsts")))
    return PackingIndex(**about["counts"], **arrays, patterns=patterns)


def _make(place: Path, store: TokenStore, length: int, alone: bool, console: Console) -> PackingIndex:
    """Write the index beside its place, then rename it."""
    if alone:  # nobody else is at work here: what lies about was left by a process that was killed
        for left in place.parent.glob(f".{place.name}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)
    with hidden_folder(place, uuid.uuid4().hex) as partial:
        _write(partial, store, length, console)
        sync_tree(partial)
        try:  # what is there already is another store's, or damaged
            publish(partial, place, replace=_open(place, store, length) is None)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # those: somebody else's, and alike
                raise
    made = _open(place, store, length)
    if made is None:
        raise OSError(errno.EIO, "it was changed while it was made")
    return made


def _write(folder: Path, store: TokenStore, length: int, console: Console) -> None:
    """Two passes over the documents' lengths: count the sizes, then list the documents by size."""
    documents = store.num_documents
    counts = np.zeros(length, np.int64)
    long = full = unlearnable = 0
    with console.progress(2 * documents, "packing into sequences", unit="document") as bar:
        for start, rests, at, pieces in _rests(store, length):
            counts += np.bincount(rests, minlength=length)
            long, full = long + len(pieces), full + int(pieces.sum())
            unlearnable += int(np.count_nonzero(rests == 0) - np.count_nonzero(rests[at] == 0))
            bar.update(start + len(rests))
        counts[0] = 0
        patterns = best_fit_decreasing(counts, length)
        begins = np.cumsum(counts) - counts  # where in the order each size begins
        small = {
            "bins": patterns.bins,
            "offsets": patterns.offsets,
            "sizes": patterns.sizes,
            "repeats": patterns.repeats,
            "firsts": patterns.firsts + begins[patterns.sizes],
            "bin_firsts": np.concatenate(([0], np.cumsum(patterns.bins))),
        }
        for name, array in small.items():
            array.astype("<i8").tofile(folder / f"{name}.bin")
        order = _Scattered(folder / "order.bin", "<u4" if documents <= 1 << 32 else "<i8", int(counts.sum()))
        before = 0
        with open(folder / "long.bin", "wb") as long_file, open(folder / "long_firsts.bin", "wb") as firsts_file:
            for start, rests, at, pieces in _rests(store, length):
                order.put(start, rests, begins)
                long_file.write((start + at).astype("<i8").tobytes())
                firsts_file.write((before + np.cumsum(pieces) - pieces).astype("<i8").tobytes())
                before += int(pieces.sum())
                bar.update(documents + start + len(rests))
    about = {
        "version": VERSION,
        "store": store.info.idx_sha256,
        "length": length,
        "counts": {
            "documents": documents,
            "unlearnable": unlearnable,
            "inputs": int(counts @ np.arange(length)) + full * length,
            "full": full,
            "sequences": full + int(patterns.bins.sum()),
        },
        "arrays": {name: ["<i8", len(array)] for name, array in small.items()}
        | {"long": ["<i8", long], "long_firsts": ["<i8", long], "order": [order.dtype, order.count]},
    }
    (folder / "index.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _rests(store: TokenStore, length: int) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Block by block: its first document, all rests, which documents are long, and their full pieces."""
    for start in range(0, store.num_documents, BLOCK):
        rests = np.maximum(np.asarray(store.lengths[start : start + BLOCK], np.int32) - 1, 0)
        at = np.flatnonzero(rests >= length)
        pieces, rests[at] = np.divmod(rests[at], length)
        release_pages(store.lengths)
        yield start, rests, at, pieces.astype(np.int64)


class _Scattered:
    """A file of documents by size, filled a block at a time: each size's next ones go behind its last ones."""

    def __init__(self, path: Path, dtype: str, count: int):
        self.path, self.dtype, self.count = path, dtype, count
        with open(path, "wb") as file:
            size = count * np.dtype(dtype).itemsize
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a fault while writing
            else:
                file.truncate(size)

    def put(self, start: int, rests: np.ndarray, begins: np.ndarray) -> None:
        """Place documents `start, start + 1, ...`, and move `begins` on."""
        if len(begins) <= 1 << 16:
            rests = rests.astype(np.uint16)  # sorted by radix, ten times faster
        counts = np.bincount(rests, minlength=len(begins))
        order = np.argsort(rests, kind="stable")[counts[0] :]
        counts[0] = 0
        if len(order) == 0:
            return
        places = np.arange(len(order)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
        # Mapped anew for every block: pages that were written would otherwise stay this process's memory.
        target = np.memmap(self.path, self.dtype, mode="r+", shape=(self.count,))
        target[places] = order + start
        begins += counts
