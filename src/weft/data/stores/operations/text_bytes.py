"""The bytes of documents' text, counted from their ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.headers import tokenizer_file

PIECE = 1 << 20  # tokens looked up at once


class TextBytes:
    """Counts UTF-8 bytes: by a table of the tokens' bytes for byte-level tokenizers, else by decoding.

    Raises:
        UserError: no such tokenizer, or not the store's.
    """

    def __init__(self, tokenizer: str | Path, digest: str | None, vocab_size: int):
        self.tokenizer = open_tokenizer(tokenizer, digest)
        self._table = byte_table(tokenizer_file(tokenizer), vocab_size)

    def count(self, tokens: np.ndarray, lengths: np.ndarray) -> int:
        """Bytes of the documents' text; each one's last token is its end and has none."""
        if self._table is None:
            ends = np.cumsum(lengths)
            return sum(
                len(self.tokenizer.decode(tokens[end - length : end - 1].tolist()).encode())
                for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
            )
        total = sum(
            int(self._table[np.asarray(tokens[start : start + PIECE])].sum()) for start in range(0, len(tokens), PIECE)
        )
        return total - int(self._table[tokens[np.cumsum(lengths) - 1]].sum())


def open_tokenizer(path: str | Path, digest: str | None) -> Tokenizer:
    """The tokenizer at `path`, if it is the one that packed the store, as far as the store says which one that is.

    Raises:
        UserError: it is another one, or there is none.
    """
    tokenizer = Tokenizer.load(path)
    if digest not in (None, tokenizer.digest):
        raise UserError(f"the store was packed with another tokenizer ({digest[:16]}); name that", path)
    return tokenizer


def byte_table(file: Path, vocab_size: int) -> np.ndarray | None:
    """Bytes of each id's text `[vocab_size]`, where each character of a token's name stands for one byte of it.

    None for tokenizers that are not of that kind.
    """
    try:
        content = json.loads(file.read_bytes())
        decoder = content.get("decoder") or {}
        vocabulary = content["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # With a normalizer the text that was packed is not the text that the ids give, but the latter is all there is.
    if decoder.get("type") != "ByteLevel" or not isinstance(vocabulary, dict):
        return None
    table = np.zeros(vocab_size, np.int64)
    for token, id in vocabulary.items():
        if id < vocab_size:
            table[id] = len(token)
    for added in content.get("added_tokens") or []:
        if added["id"] < vocab_size:
            table[added["id"]] = len(added["content"].encode())
    return table
