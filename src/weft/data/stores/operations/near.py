"""Nearly equal documents, by MinHash and locality-sensitive hashing.

Broder, "On the resemblance and containment of documents", 1997; banding as in Leskovec, Rajaraman & Ullman, "Mining of
Massive Datasets", chapter 3. The signatures are rensa's; tables are files, so memory does not grow with the documents.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.permutation import mix
from weft.data.stores.indexed import release
from weft.data.stores.operations.equal_keys import Groups
from weft.data.stores.operations.scan import Block, read_parts, scan
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.observe.console import Console

PERMUTATIONS, SEED = 128, 42
LONGEST = 1 << 24  # tokens of a document that are looked at
LEADERS = 8  # of documents that fell together by chance: with so many of them each other one is compared
LONGEST_NGRAM = 64  # tokens: each more is a pass over all; so long a common run is a copy already
ROLLED = 1 << 17  # n-grams hashed at once: they stay in the processor's cache
MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
SIGNED = 1 << 13  # documents signed at once: rensa gives their signatures as lists
CANDIDATES = 1 << 15  # pairs of signatures compared at once: 32 MB


class NearDuplicates:
    """Documents whose sets of token n-grams have an estimated Jaccard similarity of at least `threshold`.

    Two are linked if they agree in one band of their signatures and in at least `threshold` of its 128 numbers (the
    estimate's standard error is 0.035 at 0.8); what is linked, also through a third, is a cluster.

    Args:
        work: an empty folder for 700 bytes a document.
        ngram: consecutive tokens that are one element; a shorter document is one element as a whole.
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
        """See whether it can be done.

        Raises:
            UserError: numbers out of range, or rensa is not installed.
        """
        if not 0.3 <= threshold <= 1:
            raise UserError(f"--threshold {threshold:g}: a number from 0.3 to 1 is needed")
        if not 1 <= ngram <= LONGEST_NGRAM:
            raise UserError(f"--ngram {ngram}: a number from 1 to {LONGEST_NGRAM} is needed")
        try:
            _rensa()
        except ImportError:
            raise UserError("near duplicates need rensa; pip install 'weft-train[dedup]'") from None

    @staticmethod
    def settings() -> dict[str, Any]:
        """What the result depends on besides the caller's arguments."""
        return {"permutations": PERMUTATIONS, "seed": SEED, "rensa": int(_rensa().ALGORITHM_VERSION)}

    def find(self, first_of: np.ndarray):
        """Say of each item which is the first of its cluster: `first_of` int64 `[items]`.

        Returns:
            A function of two arrays of items that estimates their similarities.
        """
        self._sign(first_of)
        with self.console.progress(self.bands, "comparing", unit="band") as bar:
            for band in range(self.bands):
                groups = Groups(self.work, self.items)
                for start in range(0, self.items, 1 << 20):
                    groups.add(np.array(self.keys[band, start : start + (1 << 20)])[:, None], start)
                    release(self.keys)
                for numbers, group in groups.equal():
                    self._link(numbers, group, first_of)
                bar.update(band + 1)
        for start in range(0, self.items, 1 << 20):
            first_of[start : start + (1 << 20)] = _roots(first_of, np.array(first_of[start : start + (1 << 20)]))
        return self.similarity

    def similarity(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The share of the signatures' numbers in which items agree, pair by pair."""
        found, size = np.empty(len(left)), 4 * PERMUTATIONS
        with open(self.work / "signatures", "rb", buffering=0) as file:
            for start in range(0, len(left), CANDIDATES):
                part = slice(start, start + CANDIDATES)
                rows = [
                    read_parts(file, numbers[part] * size, np.full(len(numbers[part]), size), np.dtype(np.uint32))
                    for numbers in (left, right)
                ]
                found[part] = (rows[0] == rows[1]).reshape(-1, PERMUTATIONS).mean(1)
        return found

    def _sign(self, first_of: np.ndarray) -> None:
        table = mix(np.arange(1, self.store.info.vocab_size + 1, dtype=np.uint64) * MULTIPLIER)
        with self.console.progress(self.store.num_tokens, "signing", unit="token") as bar:
            for block in scan(self.store, bar.update):
                hashes, ends = shingles(block, self.step, self.ngram, table)
                first, offsets = block.first // self.step, np.concatenate([[0], ends])
                first_of[first : first + len(ends)] = np.arange(first, first + len(ends))
                for start in range(0, len(ends), SIGNED):
                    part = offsets[start : start + SIGNED + 1]
                    self._put(first + start, hashes[part[0] : part[-1]], (part - part[0]).astype(np.uint64))
                release(self.signatures, self.keys, first_of)

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
        """Compare the items of each group with its first; those unlike it with the first of these; and so on."""
        for _ in range(LEADERS):
            starts = np.concatenate([[True], group[1:] != group[:-1]])
            leaders = numbers[starts][np.cumsum(starts) - 1]
            numbers, leaders, group = numbers[~starts], leaders[~starts], group[~starts]
            if not len(numbers):
                return
            linked = _roots(first_of, leaders) == _roots(first_of, numbers)
            new = np.flatnonzero(~linked)
            alike = new[self.similarity(leaders[new], numbers[new]) >= self.threshold]
            for leader, number in zip(leaders[alike].tolist(), numbers[alike].tolist(), strict=True):
                a, b = _root(first_of, leader), _root(first_of, number)
                first_of[max(a, b)] = min(a, b)
            linked[alike] = True
            numbers, group = numbers[~linked], group[~linked]
            if not len(numbers):
                return


def _rensa() -> Any:
    """rensa's signatures; the package comes without types."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    return RMinHash


def rows_per_band(threshold: float) -> int:
    """The most rows with which 99 of 100 pairs just at the threshold agree in a band."""
    for rows in range(16, 1, -1):
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= 0.99:
            return rows
    return 1


def shingles(block: Block, step: int, ngram: int, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the n-grams of each item's ids (without its last one, the end): uint64, and where each item's end.

    Args:
        table: a random uint64 number for each id.
    """
    lengths = block.lengths.reshape(-1, step).sum(1)
    tokens, sizes = block.tokens, np.minimum(lengths - 1, LONGEST)
    if len(sizes) == 1:  # perhaps a very long one
        tokens, lengths = tokens[: int(sizes[0]) + 1], sizes + 1
    stops = np.cumsum(lengths)
    counts = np.maximum(sizes - ngram + 1, 1)
    ends = np.cumsum(counts)
    within = np.ones(len(tokens), bool)  # an n-gram begins here and ends before the item's end
    for back in range(1, ngram + 1):
        within[np.maximum(stops - back, 0)] = False
    rolled = np.concatenate([_rolled(tokens, start, ngram, table) for start in range(0, len(tokens), ROLLED)])
    full = sizes >= ngram
    if full.all():
        return rolled[within], ends
    hashes = np.zeros(int(ends[-1]), np.uint64)
    hashes[np.repeat(full, counts)] = rolled[within]
    for number in np.flatnonzero(~full).tolist():
        ids = tokens[stops[number] - lengths[number] : stops[number] - 1].astype(np.int64)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        hashes[ends[number] - 1] = int.from_bytes(digest, "little")
    return hashes, ends


def _rolled(tokens: np.ndarray, start: int, ngram: int, table: np.ndarray) -> np.ndarray:
    """A hash of the n-gram that begins at each of `ROLLED` tokens from `start` (of nothing, where the tokens end)."""
    size = min(ROLLED, len(tokens) - start)
    drawn = np.zeros(size + ngram - 1, np.uint64)
    part = tokens[start : start + len(drawn)]
    drawn[: len(part)] = np.take(table, part, mode="clip")
    rolled = drawn[:size].copy()
    for k in range(1, ngram):
        rolled *= MULTIPLIER
        rolled += drawn[k : k + size]
    return mix(rolled)


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
