"""Best-fit decreasing by counts: which sizes share a sequence, for any number of documents.

Ding et al., "Fewer Truncations Improve Language Modeling", 2024: whole documents, longest first, each into the fullest
sequence that still has room. Documents of one size are interchangeable, so sequences alike are kept as one pattern with
a count (Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021): the work grows with the number
of sizes, not of documents, and the result is that of placing one document after the other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A pattern while it grows: what it was before, and so many items of a size more.
_Pattern = tuple["_Pattern | None", int, int]


@dataclass(frozen=True)
class Patterns:
    """Sequences, as many of a kind as there are, and what each holds. `p` numbers patterns, `t` their parts.

    The `b`-th sequence of pattern `p` holds, for each part `t` in `offsets[p] .. offsets[p + 1] - 1`, the items
    `firsts[t] + b * repeats[t]` to `firsts[t] + (b + 1) * repeats[t] - 1` among those of size `sizes[t]`.

    Attributes:
        bins: sequences of each pattern, int64 `[patterns]`.
        offsets: where each one's parts begin, int64 `[patterns + 1]`.
        sizes, repeats, firsts: int64 `[parts]`; a pattern's sizes descend.
    """

    bins: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    repeats: np.ndarray
    firsts: np.ndarray


def best_fit_decreasing(counts: Sequence[int] | np.ndarray, capacity: int) -> Patterns:
    """Put items into sequences of at most `capacity`.

    Args:
        counts: `counts[s]` items have size `s`; those of size 0 are left out. No size is above `capacity`.
    """
    spaces: list[int] = []  # ascending: free space for which there are open sequences
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
            # The sequence that just took an item is now the fullest with room for the next, until it has none: so each
            # takes as many as fit, and one may get the few that are left.
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
                assert pattern is not None  # new sequences are as many as are needed
                put(pattern, bins, space)
    for space in spaces:
        full += open_[space]
    return _numbered(full, len(counts))


def _numbered(patterns: list[tuple[_Pattern, int]], sizes: int) -> Patterns:
    """Flatten the patterns, and give each its items: those of a size in order, the first pattern's first."""
    offsets, parts, used = [0], [], [0] * sizes
    for pattern, bins in patterns:
        own = []
        link: _Pattern | None = pattern
        while link is not None:
            link, size, repeat = link
            own.append((size, repeat, used[size]))
            used[size] += bins * repeat
        parts += reversed(own)
        offsets.append(len(parts))
    columns = np.array(parts, np.int64).reshape(-1, 3).T
    bins = np.array([bins for _, bins in patterns], np.int64)
    return Patterns(bins, np.array(offsets, np.int64), *map(np.ascontiguousarray, columns))
