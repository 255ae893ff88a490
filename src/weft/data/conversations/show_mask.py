"""Renders a document with its loss mask as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def render_mask(ids: np.ndarray, mask: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str:
    """Returns the text of a document, with `{+` and `+}` around trained tokens, as in `git diff --word-diff`.

    Args:
        ids, mask: token ids and loss mask of the document, `[tokens]`.
        decode: function that decodes ids to text. It is called for each run of tokens with the same mask, so a
            character that is split between two runs becomes U+FFFD.
    """
    learned = np.asarray(mask) != 0
    edges = np.flatnonzero(np.diff(learned)) + 1
    rendered = []
    for run, run_learned in zip(np.split(np.asarray(ids), edges), np.split(learned, edges), strict=True):
        text = decode(run.tolist())
        rendered.append(f"{{+{text}+}}" if run_learned.any() else text)
    return "".join(rendered)
