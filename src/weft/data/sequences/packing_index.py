"""The packing index, which assigns documents to sequences. It is built once per store and sequence length.

A document of n tokens has n - 1 inputs, each with the next token as its label. A document with more inputs than a
sequence is split into full-length slices and a remainder. Remainders are packed by best fit.

With `whole`, nothing is split. What is packed are items: a document, or the two adjacent documents of a preference.
Items that do not fit into a sequence, and items with a document without learned labels, are in no sequence.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.data.sequences.best_fit import Patterns, best_fit_decreasing, one_per_sequence
from weft.data.stores.indexed import document_blocks, map_file, release_pages
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

    "Item" means a document of the store, or a preference pair if the index was built with `whole`.

    Attributes:
        documents: number of items of the store.
        unlearnable: number of items that are in no sequence, because a document has at most one token or, with `whole`,
            no learned label.
        inputs: number of tokens in all sequences, without padding.
        full: number of sequences that are full-length slices.
        sequences: number of all sequences.
        long: indices in the store of the documents with full-length slices, int64.
        long_firsts: for each document in `long`, the index of the sequence that contains its first slice, int64.
        order: indices in the store of the items with a remainder, sorted by the remainder's size and then by index.
        patterns: the sequences with remainders, grouped by the sizes of their remainders. As returned by
            `best_fit_decreasing`, except that `firsts` contains positions in `order`.
        bin_firsts: index of the first sequence of each pattern, counted from `full`. The last element is the number of
            sequences with remainders. int64.
        too_long: number of items that are in no sequence, because they are longer than a sequence. 0 without `whole`.
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
    too_long: int = 0

    def items_of(self, sequence: int, length: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the contents of sequence `sequence`, whose length is `length`.

        Returns:
            The indices in the store of the items in this sequence; the number of inputs of each of these items that the
            sequence contains; and, for a full-length slice, the index of the slice in its document. If the sequence is
            not a full-length slice, this index is -1, and the sequence contains the last inputs of each of its items.
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


@dataclass(frozen=True)
class _Request:
    """What determines an index. The arguments of `packing_index` have the same names."""

    store: TokenStore
    length: int
    method: str
    whole: bool
    last_tokens: bool

    @property
    def name(self) -> str:
        return f"{self.method}{'-whole' * self.whole}{'-last' * self.last_tokens}-{self.length}"

    @property
    def digest(self) -> str:
        """The digest of the store's index; with `whole`, joined with that of the loss mask."""
        info = self.store.info
        return f"{info.idx_sha256} {info.mask_sha256}" if self.whole else info.idx_sha256


def packing_index(
    store: TokenStore,
    length: int,
    console: Console | None = None,
    method: str = "best_fit",
    *,
    whole: bool = False,
    last_tokens: bool = False,
) -> PackingIndex:
    """Opens the store's index for sequences of `length` tokens, and builds the index first if it does not exist.

    The index is written to `STORE/packing/<method>-<length>`, or to the user's cache folder if the store is read-only.
    It is built in a hidden folder, which is renamed when the index is complete. Of several processes, one builds the
    index and the others wait. On a file system without locks, each process builds the same index, and the first index
    is kept.

    Args:
        method: "best_fit", or "pad" for one item per sequence.
        whole: whether to pack items that are never split, and to leave out items without learned labels.
        last_tokens: whether the last token of each document is an input, too. Requires `whole`.

    Raises:
        UserError: the index cannot be written.
    """
    request = _Request(store, length, method, whole, last_tokens)
    name = request.name
    places = [store.path / "packing" / name, cache_folder() / "packing" / store.info.idx_sha256[:16] / name]
    for place in places:
        if (found := _open(place, request)) is not None:
            return found
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with locked(place.parent / f".{name}.lock") as alone:
                return _open(place, request) or _build(place, request, alone, console or Console(False))
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or place is places[-1]:
                raise UserError(
                    f"the index of packed sequences cannot be written: {error.strerror}; free disk space, or set "
                    "data.packing to concatenate, which needs no index",
                    place,
                ) from None
    raise AssertionError("unreachable")


def _open(folder: Path, request: _Request) -> PackingIndex | None:
    """Returns the index in `folder`, or None if the index is missing, is incomplete or belongs to another store."""
    try:
        about = json.loads((folder / "index.json").read_bytes())
        if (about["version"], about["store"], about["length"]) != (VERSION, request.digest, request.length):
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


def _build(place: Path, request: _Request, locked: bool, console: Console) -> PackingIndex:
    """Writes the index to a temporary folder, renames the folder to `place`, and opens the index.

    Args:
        locked: whether this process holds the lock, so that no other process builds the index.
    """
    if locked:  # no other process is writing, so partial folders were left by killed processes
        for left in place.parent.glob(f".{place.name}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)
    with hidden_folder(place, uuid.uuid4().hex) as partial:
        _write(partial, request, console)
        sync_tree(partial)
        try:  # an existing index that cannot be opened is damaged, or is that of another store
            publish(partial, place, replace=_open(place, request) is None)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process has published the same index
                raise
    index = _open(place, request)
    if index is None:
        raise OSError(errno.EIO, "another program changed the index while it was being built; run the command again")
    return index


def _write(folder: Path, request: _Request, console: Console) -> None:
    """Writes the index in two passes over the documents' lengths.

    The first pass counts the items of each size; the second sorts the items by size.
    """
    store, length = request.store, request.length
    blocks = partial(_items, last_tokens=request.last_tokens) if request.whole else _documents
    items = store.num_documents // (store.info.item_documents if request.whole else 1)
    counts = np.zeros(length + 1, np.int64)
    long = full = unlearnable = too_long = 0
    with console.progress(items, "packing into sequences", unit="document") as bar:
        for block in blocks(store, length):
            counts += np.bincount(block.sizes, minlength=length + 1)
            long, full = long + len(block.slices), full + int(block.slices.sum())
            unlearnable, too_long = unlearnable + block.unlearnable, too_long + block.too_long
            bar.update((block.first + len(block.sizes)) // 2)  # half of the work
        counts[0] = 0
        patterns = one_per_sequence(counts) if request.method == "pad" else best_fit_decreasing(counts, length)
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
        order = _ItemsBySize(folder / "order.bin", "<u4" if items <= 1 << 32 else "<i8", int(counts.sum()))
        before = 0
        with open(folder / "long.bin", "wb") as long_file, open(folder / "long_firsts.bin", "wb") as firsts_file:
            for block in blocks(store, length):
                order.put(block.first, block.sizes, begins)
                long_file.write((block.first + block.long).astype("<i8").tobytes())
                firsts_file.write((before + np.cumsum(block.slices) - block.slices).astype("<i8").tobytes())
                before += int(block.slices.sum())
                bar.update((items + block.first + len(block.sizes)) // 2)
    about = {
        "version": VERSION,
        "store": request.digest,
        "length": length,
        "counts": {
            "documents": items,
            "unlearnable": unlearnable,
            "too_long": too_long,
            "inputs": int(counts @ np.arange(length + 1)) + full * length,
            "full": full,
            "sequences": full + int(patterns.bins.sum()),
        },
        "arrays": {name: ["<i8", len(array)] for name, array in small.items()}
        | {"long": ["<i8", long], "long_firsts": ["<i8", long], "order": [order.dtype, order.count]},
    }
    (folder / "index.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


class _Block(NamedTuple):
    """The sizes of consecutive items.

    Attributes:
        first: index of the first item.
        sizes: number of inputs of each item, without full-length slices, int32 or int64; 0 for items that are left out.
        long: positions in the block of the documents with full-length slices.
        slices: number of full-length slices of each of these documents, int64.
        unlearnable, too_long: number of items that are left out, as in `PackingIndex`.
    """

    first: int
    sizes: np.ndarray
    long: np.ndarray
    slices: np.ndarray
    unlearnable: int
    too_long: int = 0


def _documents(store: TokenStore, length: int) -> Iterator[_Block]:
    """Yields blocks of documents, which are split if they are longer than a sequence."""
    for start in range(0, store.num_documents, BLOCK):
        remainders = np.maximum(np.asarray(store.lengths[start : start + BLOCK], np.int32) - 1, 0)
        unlearnable = int(np.count_nonzero(remainders == 0))
        at = np.flatnonzero(remainders >= length)
        slices, remainders[at] = np.divmod(remainders[at], length)
        release_pages(store.lengths)
        yield _Block(start, remainders, at, slices.astype(np.int64), unlearnable)


def _items(store: TokenStore, length: int, last_tokens: bool) -> Iterator[_Block]:
    """Yields blocks of items, which are not split. Items without learned labels, and too long ones, have size 0."""
    step, none = store.info.item_documents, np.zeros(0, np.int64)
    for first, stop, begin, end in document_blocks(store.lengths, step):
        lengths = np.array(store.lengths[first:stop], np.int64)
        sizes = learned = np.maximum(lengths - 1, 0)
        if store.loss_mask is not None:
            before = np.concatenate(([0], np.cumsum(store.loss_mask[begin:end] > 0)))
            ends = np.cumsum(lengths)
            learned = before[ends] - before[ends - sizes]  # the first token of a document is no label
        release_pages(store.lengths, store.loss_mask)
        learnable = (learned.reshape(-1, step) > 0).all(1)
        sizes = (sizes + last_tokens).reshape(-1, step).sum(1)
        fits = sizes <= length
        left_out = int(np.count_nonzero(~learnable)), int(np.count_nonzero(learnable & ~fits))
        yield _Block(first // step, np.where(learnable & fits, sizes, 0), none, none, *left_out)


class _ItemsBySize:
    """A file of item indices sorted by the items' sizes. It is filled block by block."""

    def __init__(self, path: Path, dtype: str, count: int):
        self.path, self.dtype, self.count = path, dtype, count
        with open(path, "wb") as file:
            size = count * np.dtype(dtype).itemsize
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS while writing
            else:
                file.truncate(size)

    def put(self, start: int, sizes: np.ndarray, begins: np.ndarray) -> None:
        """Writes the item indices `start`, `start + 1`, ... to their positions in the file.

        Args:
            sizes: size of each item; items of size 0 are left out.
            begins: for each size, the position in the file of the next item of this size. The call updates it.
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
