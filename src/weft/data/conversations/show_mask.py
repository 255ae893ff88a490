"""A document with its loss mask, for people to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def with_mask(ids: np.ndarray, mask: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str:
    """The text of a document, with `{+` and `+}` around what is learned (as `git diff --word-diff` shows new words).

    Args:
        ids, mask: `[tokens]`, as a store's `document` and that part of its `loss_mask`.
        decode: a tokenizer's. Runs are decoded by themselves: a character cut in two shows as U+FFFD.
    """
    learned = np.asarray(mask) != 0
    cuts = np.flatnonzero(np.diff(learned)) + 1
    shown = []
    for run, part in zip(np.split(np.asarray(ids), cuts), np.split(learned, cuts), strict=True):
        text = decode(run.tolist())
        shown.append(f"{{+{text}+}}" if part.any() else text)
    return "".join(shown)
