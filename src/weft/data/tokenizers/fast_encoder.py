"""gigatoken, given what it may have: many texts in one call, and back as one array."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.data.tokenizers.exactness import SEPARATOR, Doubts, Recipe, cut

PARALLEL_BYTES = 4 << 20  # from here on gigatoken's threads are worth the 0.2 s that they cost at first


class FastEncoder:
    """gigatoken with a recipe, and which texts it may have.

    Attributes:
        doubts: about the characters of texts.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.doubts = Doubts(recipe)
        fenced = (*recipe.fenced, SEPARATOR)
        every = (*recipe.first, *recipe.then, *fenced)
        self._every, self._fenced = _either(every), _either(fenced)
        self._splits = [_either(texts) for texts in (recipe.first, recipe.then) if texts]
        # Finding a word is many times faster than a regex; of many (`<|reserved_17|>`) the way they begin will do.
        self._hints = every if len(every) <= 4 else tuple({text[:2] for text in every})

    @functools.cached_property
    def _gigatoken(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_json(self.recipe.json)

    @functools.cached_property
    def refusal(self) -> str | None:
        """Why gigatoken does not take the recipe; None if it does."""
        try:
            _ = self._gigatoken
        except RuntimeError as error:  # what it raises, with where in its source, for all that it cannot load
            return str(error).partition("\n")[0]
        return None

    def special_in(self, text: str) -> bool:
        """Whether the text of an added token is in a text."""
        return any(hint in text for hint in self._hints) and self._every.search(text) is not None

    def fenced_in(self, text: str) -> bool:
        """Whether the text of an added token is in it that only `tokenizers` handles."""
        return self._fenced.search(text) is not None

    def slices(self, text: str) -> list[str]:
        """A text in pieces that may be encoded one by one, or the text alone."""
        return cut(text) if self.recipe.by_words and not self.fenced_in(text) else [text]

    def split(self, text: str) -> list[tuple[str, bool]]:
        """A text's parts in order, and which are added tokens."""
        parts = [(text, False)]
        for pattern in self._splits:
            new: list[tuple[str, bool]] = []
            for part, special in parts:
                pieces = [part] if special else pattern.split(part)
                new += [(piece, special or n % 2 == 1) for n, piece in enumerate(pieces) if piece]
            parts = new
        return parts

    def encode(self, texts: list[str], eod: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Ids end to end and their numbers; `eod` closes each text, unless it is None.

        Raises:
            RuntimeError: gigatoken does not take the recipe; `refusal` says so before.
        """
        if not self.recipe.by_words:
            return joined([[self._gigatoken.encode(text)] for text in texts], eod)
        # One call for all texts, whose ids come back as one array. As bytes: one wide character would make a joined
        # str four times as large.
        data = SEPARATOR.encode().join([*map(str.encode, texts), b""])
        if len(data) < PARALLEL_BYTES or one_thread():
            ids = self._gigatoken.encode(data)
        else:
            import gigatoken

            # Its other ways to give many ids back import awkward.
            ids = self._gigatoken.encode_batch_padded(gigatoken.BytesSource(data), pad_id=0)[0][0]
        ends = np.flatnonzero(ids == self.recipe.separator)
        lengths = np.diff(ends, prepend=-1)
        if eod is None:
            return np.delete(ids, ends), lengths - 1
        ids[ends] = eod
        return ids, lengths


def one_thread() -> bool:
    """Whether this process is to use one thread: one of several that share the work."""
    return os.environ.get("RAYON_NUM_THREADS") == "1" or multiprocessing.parent_process() is not None


def _either(texts: Sequence[str]) -> re.Pattern[str]:
    """Finds the leftmost of some texts, and the longest of those that begin there, as `tokenizers` does."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")


def joined(rows: list[list[np.ndarray]], eod: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ids of texts, each in parts, end to end, and how many are each text's; `eod` closes each, unless it is None."""
    if eod is not None:
        end = np.array([eod], np.uint32)
        rows = [[*row, end] for row in rows]
    lengths = np.array([sum(map(len, row)) for row in rows], np.int64)
    parts = [part for row in rows for part in row]
    return (np.concatenate(parts) if parts else np.zeros(0, np.uint32)), lengths
