"""Renders a document with its loss mask as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]
MARKS = ("{+", "+}")  # as in `git diff --word-diff`
GREEN = ("\x1b[1;32m", "\x1b[0m")  # for terminals


def mask_runs(ids: np.ndarray, mask: np.ndarray, decode: Decode) -> list[tuple[str, bool]]:
    """Splits a document into runs of tokens with the same mask. Returns the text of each run, and if it is trained on.

    Args:
        ids, mask: token ids and loss mask of the document, `[tokens]`.
        decode: function that decodes ids to text. It is called for each run, so a character that is split between two
            runs becomes U+FFFD.
    """
    learned = np.asarray(mask) != 0
    edges = np.flatnonzero(np.diff(learned)) + 1
    runs = zip(np.split(np.asarray(ids), edges), np.split(learned, edges), strict=True)
    return [(decode(run.tolist()), bool(marks.any())) for run, marks in runs]


def render_mask(ids: np.ndarray, mask: np.ndarray, decode: Decode, marks: tuple[str, str] = MARKS) -> str:
    """Returns the text of a document, with `marks` around the tokens that are trained on.

    Args:
        ids, mask, decode: as for `mask_runs`.
    """
    return "".join(text.join(marks) if learned else text for text, learned in mask_runs(ids, mask, decode))
