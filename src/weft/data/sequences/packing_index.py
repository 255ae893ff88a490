"""The packing index, which assigns documents to sequences. It is built once per store and sequence length.

A document of n tokens has n - 1 inputs, each with the next token as its label. A document with more inputs than a
sequence is split into full-length slices and a remainder. Remainders are packed by best fit.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.data.sequences.best_fit import Patterns, best_fit_decreasing, one_per_sequence
from weft.data.stores.indexed import map_file, release_pages
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.files import cache_folder, hidden_folder, locked, publish, sync_tree
from weft.observe.console import Console

VERSION = 1
BLOCK = 1 << 22  # documents processed at a time: about 200 MB


@dataclass(frozen=True)
class PackingIndex:
    """A memory-mapped packing index.

    Sequences `0 .. full - 1` are full-length slices of long documents. The other sequences contain remainders.

    Attributes:
        documents: number of documents of the store.
        unlearnable: number of documents of at most one token, which are in no sequence.
        inputs: number of tokens in all sequences, without padding.
        full: number of sequences that are full-length slices.
        sequences: number of all sequences.
        long: indices in the store of the documents with full-length slices, int64.
        long_firsts: for each document in `long`, the index of the sequence that contains its first slice, int64.
        order: indices in the store of the documents with a remainder, sorted by the remainder's size and then by index.
        patterns: the sequences with remainders, grouped by the sizes of their remainders. As returned by
            `best_fit_decreasing`, except that `firsts` contains positions in `order`.
        bin_firsts: index of the first sequence of each pattern, counted from `full`. The last element is the number of
            sequences with remainders. int64.
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
        """Returns the contents of sequence `sequence`, whose length is `length`.

        Returns:
            The indices in the store of the documents in this sequence; the number of inputs of each of these documents
            that the sequence contains; and, for a full-length slice, the index of the slice in its document. If the
            sequence is not a full-length slice, this index is -1, and the sequence contains the last inputs of each of
            its documents.
        """
        if sequence < self.full:
            at = int(np.searchsorted(self.long_firsts, sequence, side="right")) - 1
            return self.long[at : at + 1], np.array([length]), sequence - int(self.long_firsts[at])
        number = sequence - self.full
        pattern = int(np.searchsorted(self.bin_firsts, number, side="right")) - 1
        number -= int(self.bin_firsts[pattern])
        entries = slice(*self.patterns.offsets[pattern : pattern + 2].tolist())
        repeats = self.patterns.repeats[entries]
        firsts = (self.patterns.firsts[entries] + number * repeats).tolist()
        documents = [self.order[first : first + n] for first, n in zip(firsts, repeats.tolist(), strict=True)]
        return np.concatenate(documents), np.repeat(self.patterns.sizes[entries], repeats), -1


def packing_index(
    store: TokenStore, length: int, console: Console | None = None, method: str = "best_fit"
) -> PackingIndex:
    """Opens the store's index for sequences of `length` tokens, and builds the index first if it does not exist.

    The index is written to `STORE/packing/<method>-<length>`, or to the user's cache folder if the store is read-only.
    It is built in a hidden folder, which is renamed when the index is complete. Of several processes, one builds the
    index and the others wait. On a file system without locks, each process builds the same index, and the first index
    is kept.

    Args:
        method: "best_fit", or "pad" for one document per sequence.

    Raises:
        UserError: the index cannot be written.
    """
    name = f"{method}-{length}"
    places = [store.path / "packing" / name, cache_folder() / "packing" / store.info.idx_sha256[:16] / name]
    for place in places:
        if (found := _open(place, store, length)) is not None:
            return found
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with locked(place.parent / f".{name}.lock") as alone:
                return _open(place, store, length) or _build(place, store, length, alone, console or Console(False))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or place is places[-1]:
                raise UserError(
                    f"the index of packed sequences cannot be written: {error.strerror}; free disk space, or set "
                    "data.packing to concatenate, which needs no index",
                    place,
                ) from None
    raise AssertionError("unreachable")


def _open(folder: Path, store: TokenStore, length: int) -> PackingIndex | None:
    """Returns the index in `folder`, or None if the index is missing, is incomplete or belongs to another store."""
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
        return None  # missing or damaged: it is built (again)
    patterns = Patterns(*(arrays.pop(name) for name in ("bins", "offsets", "sizes", "repeats", "firsts")))
    return PackingIndex(**about["counts"], **arrays, patterns=patterns)


def _build(place: Path, store: TokenStore, length: int, locked: bool, console: Console) -> PackingIndex:
    """Writes the index to a temporary folder, renames the folder to `place`, and opens the index.

    Args:
        length: number of tokens per sequence.
        locked: whether this process holds the lock, so that no other process builds the index.
    """
    if locked:  # no other process is writing, so partial folders were left by killed processes
        for left in place.parent.glob(f".{place.name}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)
    with hidden_folder(place, uuid.uuid4().hex) as partial:
        _write(partial, store, length, console, pad=place.name.startswith("pad"))
        sync_tree(partial)
        try:  # an existing index that cannot be opened is damaged, or is that of another store
            publish(partial, place, replace=_open(place, store, length) is None)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process has published the same index
                raise
    index = _open(place, store, length)
    if index is None:
        raise OSError(errno.EIO, "another program changed the index while it was being built; run the command again")
    return index


def _write(folder: Path, store: TokenStore, length: int, console: Console, *, pad: bool) -> None:
    """Writes the index in two passes over the documents' lengths.

    The first pass counts the documents of each size; the second sorts the documents by size.

    `pad`: whether each remainder has a sequence of its own.
    """
    documents = store.num_documents
    counts = np.zeros(length, np.int64)
    long = full = unlearnable = 0
    with console.progress(documents, "packing into sequences", unit="document") as bar:
        for start, remainders, at, slices in _remainders(store, length):
            counts += np.bincount(remainders, minlength=length)
            long, full = long + len(slices), full + int(slices.sum())
            unlearnable += int(np.count_nonzero(remainders == 0) - np.count_nonzero(remainders[at] == 0))
            bar.update((start + len(remainders)) // 2)  # half of the work
        counts[0] = 0
        patterns = one_per_sequence(counts) if pad else best_fit_decreasing(counts, length)
        begins = np.cumsum(counts) - counts  # position of each size in the order
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
        order = _DocumentsBySize(folder / "order.bin", "<u4" if documents <= 1 << 32 else "<i8", int(counts.sum()))
        before = 0
        with open(folder / "long.bin", "wb") as long_file, open(folder / "long_firsts.bin", "wb") as firsts_file:
            for start, remainders, at, slices in _remainders(store, length):
                order.put(start, remainders, begins)
                long_file.write((start + at).astype("<i8").tobytes())
                firsts_file.write((before + np.cumsum(slices) - slices).astype("<i8").tobytes())
                before += int(slices.sum())
                bar.update((documents + start + len(remainders)) // 2)
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


def _remainders(store: TokenStore, length: int) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Computes the number of full-length slices and the remainder of each document, in blocks of documents.

    Yields:
        The index of the block's first document in the store; the remainder of each document; the positions of long
        documents in the block; and the number of full-length slices of each long document.
    """
    for start in range(0, store.num_documents, BLOCK):
        remainders = np.maximum(np.asarray(store.lengths[start : start + BLOCK], np.int32) - 1, 0)
        at = np.flatnonzero(remainders >= length)
        slices, remainders[at] = np.divmod(remainders[at], length)
        release_pages(store.lengths)
        yield start, remainders, at, slices.astype(np.int64)


class _DocumentsBySize:
    """A file of document indices sorted by the documents' sizes. It is filled block by block."""

    def __init__(self, path: Path, dtype: str, count: int):
        self.path, self.dtype, self.count = path, dtype, count
        with open(path, "wb") as file:
            size = count * np.dtype(dtype).itemsize
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS while writing
            else:
                file.truncate(size)

    def put(self, start: int, sizes: np.ndarray, begins: np.ndarray) -> None:
        """Writes the document indices `start`, `start + 1`, ... to their positions in the file.

        Args:
            sizes: size of each document; documents of size 0 are left out.
            begins: for each size, the position in the file of the next document of this size. The call updates it.
        """
        if len(begins) <= 1 << 16:
            sizes = sizes.astype(np.uint16)  # radix sort, ten times faster
        counts = np.bincount(sizes, minlength=len(begins))
        order = np.argsort(sizes, kind="stable")[counts[0] :]
        counts[0] = 0
        if len(order) == 0:
            return
        positions = np.arange(len(order)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
        # A new map for each block frees the pages that were written.
        target = np.memmap(self.path, self.dtype, mode="r+", shape=(self.count,))
        target[positions] = order + start
        begins += counts
