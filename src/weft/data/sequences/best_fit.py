"""Best-fit decreasing bin packing of documents into sequences, computed on counts of document sizes.

Ding et al., "Fewer Truncations Improve Language Modeling", 2024: documents are placed from the longest to the shortest,
each into the fullest sequence with enough room. Documents of one size are interchangeable, so equal sequences are
stored as one pattern with a count (Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021). The
result is the same as placing documents one by one, but the time grows with the number of sizes, not of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A growing pattern as a linked list: the previous pattern, and the size and number of the items that were added.
_Pattern = tuple["_Pattern | None", int, int]


@dataclass(frozen=True)
class Patterns:
    """Packed sequences, grouped by pattern. Sequences of one pattern contain the same number of items of each size.

    A pattern has one entry for each item size that occurs in it. The entries of pattern `p` are
    `offsets[p] .. offsets[p + 1] - 1`. For each of these entries `t`, the `b`-th sequence of the pattern contains the
    items `firsts[t] + b * repeats[t]` to `firsts[t] + (b + 1) * repeats[t] - 1` of size `sizes[t]`.

    Attributes:
        bins: number of sequences of each pattern, int64 `[patterns]`.
        offsets: index of the first entry of each pattern, and finally the number of entries, int64 `[patterns + 1]`.
        sizes: item size of each entry, int64 `[entries]`; descending within a pattern.
        repeats: number of items of that size per sequence, int64 `[entries]`.
        firsts: index of the entry's first item among the items of that size, int64 `[entries]`.
    """

    bins: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    repeats: np.ndarray
    firsts: np.ndarray


def best_fit_decreasing(counts: Sequence[int] | np.ndarray, capacity: int) -> Patterns:
    """Packs items into sequences. The total size of the items in a sequence is at most `capacity`.

    Args:
        counts: `counts[size]` is the number of items of `size`; items of size 0 are ignored. The largest size must be
            at most `capacity`.
    """
    spaces: list[int] = []  # ascending free spaces of the open sequences
    open_: dict[int, list[tuple[_Pattern, int]]] = {}
    full: list[tuple[_Pattern, int]] = []

    def put(pattern: _Pattern, bins: int, space: int) -> None:
        if space == 0:
            full.append((pattern, bins))
        elif space in open_:
            open_[space].append((pattern, bins))
        else:
            open_[space] = [(pattern, bins)]
            insort(spaces, space)

    pattern: _Pattern | None
    for size in range(len(counts) - 1, 0, -1):
        left = int(counts[size])
        while left:
            at = bisect_left(spaces, size)
            if at < len(spaces):
                space = spaces[at]
                pattern, bins = open_[space].pop()
                if not open_[space]:
                    del open_[space], spaces[at]
            else:
                space, pattern, bins = capacity, None, -(-left // (capacity // size))
            # A sequence that just got an item is the fullest one with room for the next item of this size. So each
            # sequence gets as many items as fit, and the last one may get fewer.
            each = space // size
            filled = min(bins, left // each)
            if filled:
                put((pattern, size, each), filled, space - each * size)
                left -= filled * each
                bins -= filled
            if bins and left:
                put((pattern, size, left), 1, space - left * size)
                left, bins = 0, bins - 1
            if bins:
                assert pattern is not None  # there are no more new sequences than needed
                put(pattern, bins, space)
    for space in spaces:
        full += open_[space]
    return _number_items(full, len(counts))


def one_per_sequence(counts: Sequence[int] | np.ndarray) -> Patterns:
    """Puts each item into a sequence of its own.

    Args:
        counts: `counts[size]` is the number of items of `size`; items of size 0 are ignored.
    """
    sizes = np.flatnonzero(counts)[::-1].astype(np.int64)
    sizes = sizes[sizes > 0]
    ones = np.ones(len(sizes), np.int64)
    return Patterns(np.asarray(counts, np.int64)[sizes], np.arange(len(sizes) + 1), sizes, ones, ones - 1)


def _number_items(patterns: list[tuple[_Pattern, int]], sizes: int) -> Patterns:
    """Converts linked lists to `Patterns`. The items of each size are numbered in the order of the patterns.

    Args:
        patterns: the linked list of each pattern, and the number of its sequences.
        sizes: largest item size + 1.
    """
    offsets, entries, used = [0], [], [0] * sizes
    for pattern, bins in patterns:
        reverse = []
        link: _Pattern | None = pattern
        while link is not None:
            link, size, repeat = link
            reverse.append((size, repeat, used[size]))
            used[size] += bins * repeat
        entries += reversed(reverse)
        offsets.append(len(entries))
    columns = np.array(entries, np.int64).reshape(-1, 3).T
    bins = np.array([bins for _, bins in patterns], np.int64)
    return Patterns(bins, np.array(offsets, np.int64), *map(np.ascontiguousarray, columns))
