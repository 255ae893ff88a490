"""Encodes texts with gigatoken: many texts in one call, returned as one array."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.data.tokenizers.exactness import SEPARATOR, CharacterCheck, Recipe, split_document

PARALLEL_BYTES = 4 << 20  # from this size of a call on, gigatoken's threads are worth their start-up of 0.2 s


class FastEncoder:
    """Encodes texts with gigatoken, and finds texts for which gigatoken would not return the ids of `tokenizers`."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.characters = CharacterCheck(recipe)
        reference_only = (*recipe.reference_only, SEPARATOR)
        added = (*recipe.first, *recipe.then, *reference_only)
        self._added, self._reference_only = _any_of(added), _any_of(reference_only)
        self._splits = [_any_of(texts) for texts in (recipe.first, recipe.then) if texts]
        # `str.find` is many times faster than a regex; for many tokens (`<|reserved_17|>`), it searches their prefixes.
        self._prefixes = added if len(added) <= 4 else tuple({text[:2] for text in added})

    @functools.cached_property
    def _gigatoken(self) -> Any:
        import gigatoken

        return gigatoken.Tokenizer.from_json(self.recipe.json)

    @functools.cached_property
    def load_error(self) -> str | None:
        """gigatoken's error message if it cannot load the tokenizer (`Recipe.json`); None if it can."""
        try:
            _ = self._gigatoken
        except (
            RuntimeError
        ) as error:  # raised for all content that gigatoken cannot load; further lines refer to its source
            return str(error).partition("\n")[0]
        return None

    def has_added_token(self, text: str) -> bool:
        """Whether a text contains the text of an added token."""
        return any(prefix in text for prefix in self._prefixes) and self._added.search(text) is not None

    def needs_reference(self, text: str) -> bool:
        """Whether a text contains an added token that only `tokenizers` handles."""
        return self._reference_only.search(text) is not None

    def split_document(self, text: str) -> list[str]:
        """Splits a text into pieces that can be encoded independently; one piece, if this is not possible."""
        return split_document(text) if self.recipe.by_words and not self.needs_reference(text) else [text]

    def split_added_tokens(self, text: str) -> list[tuple[str, bool]]:
        """Splits a text at added tokens. Returns each piece, and whether the piece is an added token."""
        pieces = [(text, False)]
        for pattern in self._splits:
            new: list[tuple[str, bool]] = []
            for piece, added in pieces:
                split = [piece] if added else pattern.split(piece)
                new += [(part, added or n % 2 == 1) for n, part in enumerate(split) if part]
            pieces = new
        return pieces

    def encode(self, texts: list[str], eod: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the concatenated ids of all texts, and the number of ids of each text.

        Args:
            eod: id to append to each text; None: no id is appended.

        Raises:
            RuntimeError: gigatoken cannot load the tokenizer (see `load_error`).
        """
        if not self.recipe.by_words:
            return concatenate_ids([[self._gigatoken.encode(text)] for text in texts], eod)
        # One call for all texts. The texts are joined as bytes, because one wide character makes a str four times as
        # large.
        data = SEPARATOR.encode().join([*map(str.encode, texts), b""])
        if len(data) < PARALLEL_BYTES or one_thread():
            ids = self._gigatoken.encode(data)
        else:
            import gigatoken

            # Other functions of gigatoken that return many ids import the `awkward` library.
            ids = self._gigatoken.encode_batch_padded(gigatoken.BytesSource(data), pad_id=0)[0][0]
        ends = np.flatnonzero(ids == self.recipe.separator)
        lengths = np.diff(ends, prepend=-1)
        if eod is None:
            return np.delete(ids, ends), lengths - 1
        ids[ends] = eod
        return ids, lengths


def one_thread() -> bool:
    """Whether this process should use one thread, because it is one of several workers."""
    return os.environ.get("RAYON_NUM_THREADS") == "1" or multiprocessing.parent_process() is not None


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a regex that finds the `texts` in another text as `tokenizers` does.

    It finds the leftmost match; if several of the texts match at this position, it finds the longest.
    """
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")


def concatenate_ids(rows: list[list[np.ndarray]], eod: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the concatenated ids of all texts, and the number of ids of each text.

    Args:
        rows: for each text, arrays that together are its ids.
        eod: id to append to each text; None: no id is appended.
    """
    if eod is not None:
        end = np.array([eod], np.uint32)
        rows = [[*row, end] for row in rows]
    lengths = np.array([sum(map(len, row)) for row in rows], np.int64)
    return np.concatenate([np.zeros(0, np.uint32), *(ids for row in rows for ids in row)]), lengths
