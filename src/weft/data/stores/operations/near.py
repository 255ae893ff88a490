"""Finds near duplicates with MinHash and locality-sensitive hashing.

Broder, "On the resemblance and containment of documents", 1997; banding as in Leskovec, Rajaraman & Ullman, "Mining of
Massive Datasets", chapter 3. rensa computes the signatures. Signatures and hash tables are kept in files, so memory
does not grow with the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.permutation import mix
from weft.data.stores.indexed import release_pages
from weft.data.stores.operations.equal_keys import Groups
from weft.data.stores.operations.scan import Block, read_ranges, scan
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.observe.console import Console

PERMUTATIONS, SEED = 128, 42
LONGEST = 1 << 24  # maximum tokens of a document that are hashed; further tokens are ignored
LEADERS = 8  # maximum items of a band's group with which the other items of the group are compared
LONGEST_NGRAM = 64  # maximum tokens of an n-gram; each additional token is one more pass over all tokens
HASHED = 1 << 17  # n-grams hashed at a time: they fit into the CPU cache
MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
SIGNED = 1 << 13  # documents whose signatures are computed at a time; rensa returns signatures as lists
CANDIDATES = 1 << 15  # pairs of signatures compared at a time: 32 MB


class NearDuplicates:
    """Finds documents whose sets of token n-grams have an estimated Jaccard similarity of at least `threshold`.

    A document's signature is 128 numbers, divided into bands. Two documents are linked if their signatures agree in all
    numbers of one band, and in at least the fraction `threshold` of all 128 numbers (standard error of the estimate:
    0.035 at 0.8). Clusters are the connected components of these links.

    Args:
        work: a folder for temporary files, which take 700 bytes per document.
        threshold: minimum similarity of near duplicates.
        ngram: number of tokens per n-gram. A document with fewer tokens is a set of one element.
    """

    def __init__(self, store: TokenStore, work: Path, threshold: float, ngram: int, console: Console):
        self.store, self.work, self.threshold, self.ngram, self.console = store, work, threshold, ngram, console
        self.step = store.info.item_documents
        self.items = store.num_documents // self.step
        self.rows = rows_per_band(threshold)
        self.bands = PERMUTATIONS // self.rows
        self.signatures = np.memmap(work / "signatures", np.uint32, "w+", shape=(self.items, PERMUTATIONS))
        self.keys = np.memmap(work / "bands", np.uint64, "w+", shape=(self.bands, self.items))

    @staticmethod
    def check(threshold: float, ngram: int) -> None:
        """Checks the arguments of the constructor, and that rensa is installed.

        Raises:
            UserError: an argument is out of range, or rensa is not installed.
        """
        if not 0.3 <= threshold <= 1:
            raise UserError(f"--threshold {threshold:g}: must be from 0.3 to 1")
        if not 1 <= ngram <= LONGEST_NGRAM:
            raise UserError(f"--ngram {ngram}: must be from 1 to {LONGEST_NGRAM}")
        try:
            _rensa()
        except ImportError:
            raise UserError("near duplicates need rensa; install it with `pip install 'weft-train[dedup]'`") from None

    @staticmethod
    def settings() -> dict[str, Any]:
        """Returns the constants on which the result depends. They are recorded in the provenance of the new store."""
        return {"permutations": PERMUTATIONS, "seed": SEED, "rensa": int(_rensa().ALGORITHM_VERSION)}

    def find(self, first_of: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """Sets `first_of[i]` (int64 `[items]`) to the index of the first item in the cluster of item `i`, for all `i`.

        An item is a document, or a pair of documents in a store of preferences.

        Returns:
            The method `similarity`.
        """
        self._sign(first_of)
        with self.console.progress(self.bands, "comparing", unit="band") as bar:
            for band in range(self.bands):
                groups = Groups(self.work, self.items)
                for start in range(0, self.items, 1 << 20):
                    groups.add(np.array(self.keys[band, start : start + (1 << 20)])[:, None], start)
                    release_pages(self.keys)
                for numbers, group in groups.equal():
                    self._link(numbers, group, first_of)
                bar.update(band + 1)
        for start in range(0, self.items, 1 << 20):
            first_of[start : start + (1 << 20)] = _roots(first_of, np.array(first_of[start : start + (1 << 20)]))
        return self.similarity

    def similarity(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Estimates the similarity of items `left[i]` and `right[i]`: the fraction of equal signature numbers."""
        found, size = np.empty(len(left)), 4 * PERMUTATIONS
        with open(self.work / "signatures", "rb", buffering=0) as file:
            for start in range(0, len(left), CANDIDATES):
                chunk = slice(start, start + CANDIDATES)
                rows = [
                    read_ranges(file, numbers[chunk] * size, np.full(len(numbers[chunk]), size), np.dtype(np.uint32))
                    for numbers in (left, right)
                ]
                found[chunk] = (rows[0] == rows[1]).reshape(-1, PERMUTATIONS).mean(1)
        return found

    def _sign(self, first_of: np.ndarray) -> None:
        table = mix(np.arange(1, self.store.info.vocab_size + 1, dtype=np.uint64) * MULTIPLIER)
        with self.console.progress(self.store.num_tokens, "signing", unit="token") as bar:
            for block in scan(self.store, bar.update):
                hashes, ends = shingles(block, self.step, self.ngram, table)
                first, offsets = block.first // self.step, np.concatenate([[0], ends])
                first_of[first : first + len(ends)] = np.arange(first, first + len(ends))
                for start in range(0, len(ends), SIGNED):
                    edges = offsets[start : start + SIGNED + 1]
                    self._put(first + start, hashes[edges[0] : edges[-1]], (edges - edges[0]).astype(np.uint64))
                release_pages(self.signatures, self.keys, first_of)

    def _put(self, first: int, hashes: np.ndarray, offsets: np.ndarray) -> None:
        matrix = _rensa().digest_matrix_from_flat_token_hashes(hashes, offsets, PERMUTATIONS, SEED)
        rows = np.array(matrix.to_rows(), np.uint32)
        self.signatures[first : first + len(rows)] = rows
        bands = rows[:, : self.bands * self.rows].reshape(len(rows), self.bands, self.rows)
        keys = np.zeros((len(rows), self.bands), np.uint64)
        for row in range(self.rows):
            keys = mix(keys ^ (bands[:, :, row].astype(np.uint64) + np.uint64(row << 32)))
        self.keys[:, first : first + len(rows)] = keys.T

    def _link(self, numbers: np.ndarray, group: np.ndarray, first_of: np.ndarray) -> None:
        """Compares each item of a group with the group's first item, and links the two if they are similar.

        Repeats this with those items of the group that are not linked yet, so that up to `LEADERS` items of a group are
        compared with the others.

        Args:
            numbers, group: index and group number of each item, as yielded by `Groups.equal`.
            first_of: for each item of the store, an earlier item of its cluster, or the item itself. A link changes it.
        """
        for _ in range(LEADERS):
            starts = np.concatenate([[True], group[1:] != group[:-1]])
            leaders = numbers[starts][np.cumsum(starts) - 1]
            numbers, leaders, group = numbers[~starts], leaders[~starts], group[~starts]
            if not len(numbers):
                return
            linked = _roots(first_of, leaders) == _roots(first_of, numbers)
            new = np.flatnonzero(~linked)
            similar = new[self.similarity(leaders[new], numbers[new]) >= self.threshold]
            for leader, number in zip(leaders[similar].tolist(), numbers[similar].tolist(), strict=True):
                a, b = _root(first_of, leader), _root(first_of, number)
                first_of[max(a, b)] = min(a, b)
            linked[similar] = True
            numbers, group = numbers[~linked], group[~linked]
            if not len(numbers):
                return


def _rensa() -> Any:
    """Imports the class RMinHash of rensa, which has no type stubs."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    return RMinHash


def rows_per_band(threshold: float) -> int:
    """Returns the number of rows per band, at most 16. A row is one of the numbers of a signature.

    The result is the highest number of rows with which at least 99% of the pairs whose similarity is `threshold` agree
    in all rows of some band.
    """
    for rows in range(16, 1, -1):
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= 0.99:
            return rows
    return 1


def shingles(block: Block, step: int, ngram: int, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes the n-grams of token ids of each item in a block. The last id of an item (end of document) is left out.

    Args:
        step: number of documents per item: 2 for preference pairs, else 1.
        ngram: number of tokens per n-gram.
        table: a random uint64 number for each token id.

    Returns:
        The concatenated hashes of all items (uint64), and the position in this array at which each item's hashes end.
    """
    lengths = block.lengths.reshape(-1, step).sum(1)
    tokens, sizes = block.tokens, np.minimum(lengths - 1, LONGEST)
    if len(sizes) == 1:  # possibly longer than LONGEST
        tokens, lengths = tokens[: int(sizes[0]) + 1], sizes + 1
    stops = np.cumsum(lengths)
    counts = np.maximum(sizes - ngram + 1, 1)
    ends = np.cumsum(counts)
    within = np.ones(len(tokens), bool)  # an n-gram begins here and ends within the item
    for back in range(1, ngram + 1):
        within[np.maximum(stops - back, 0)] = False
    all_hashes = np.concatenate([_hash_ngrams(tokens, start, ngram, table) for start in range(0, len(tokens), HASHED)])
    full = sizes >= ngram
    if full.all():
        return all_hashes[within], ends
    hashes = np.zeros(int(ends[-1]), np.uint64)
    hashes[np.repeat(full, counts)] = all_hashes[within]
    for number in np.flatnonzero(~full).tolist():
        ids = tokens[stops[number] - lengths[number] : stops[number] - 1].astype(np.int64)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        hashes[ends[number] - 1] = int.from_bytes(digest, "little")
    return hashes, ends


def _hash_ngrams(tokens: np.ndarray, start: int, ngram: int, table: np.ndarray) -> np.ndarray:
    """Returns the hashes of the n-grams that begin at the tokens `start` to `start + HASHED - 1`.

    N-grams that extend beyond the last token are padded with zeros. The arguments are as in `shingles`.
    """
    size = min(HASHED, len(tokens) - start)
    random = np.zeros(size + ngram - 1, np.uint64)
    ids = tokens[start : start + len(random)]
    random[: len(ids)] = np.take(table, ids, mode="clip")
    hashes = random[:size].copy()
    for k in range(1, ngram):
        hashes *= MULTIPLIER
        hashes += random[k : k + size]
    return mix(hashes)


def _root(first_of: np.ndarray, number: int) -> int:
    while (parent := int(first_of[number])) != number:
        number = parent
    return number


def _roots(first_of: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    while True:
        parents = np.asarray(first_of[numbers])
        if np.array_equal(parents, numbers):
            return parents
        numbers = parents
