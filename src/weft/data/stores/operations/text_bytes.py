"""Counts the bytes of documents' text from the documents' token ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from weft.data.stores.indexed import BLOCK_TOKENS
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.headers import tokenizer_file


class TextBytes:
    """Counts the UTF-8 bytes of the text of documents, which are given as token ids.

    For byte-level tokenizers, a table contains the bytes of each token; for other tokenizers, documents are decoded.

    Args:
        digest: digest of the store's tokenizer, which `tokenizer` must have; None to skip the check.

    Raises:
        UserError: the tokenizer does not exist, or is not the store's tokenizer.
    """

    def __init__(self, tokenizer: str | Path, digest: str | None, vocab_size: int):
        self.tokenizer = open_tokenizer(tokenizer, digest)
        self._table = byte_table(tokenizer_file(tokenizer), vocab_size)

    def count(self, tokens: np.ndarray, lengths: np.ndarray) -> int:
        """Returns the number of bytes of the documents' text, without the end-of-document token of each document."""
        ends = np.cumsum(lengths)
        if self._table is None:
            return sum(
                len(self.tokenizer.decode(tokens[end - length : end - 1].tolist()).encode())
                for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
            )
        blocks = (tokens[start : start + BLOCK_TOKENS] for start in range(0, len(tokens), BLOCK_TOKENS))
        total = sum(int(self._table[block].sum()) for block in blocks)
        return total - int(self._table[tokens[ends - 1]].sum())


def open_tokenizer(path: str | Path, digest: str | None) -> Tokenizer:
    """Loads a tokenizer, and checks that it is the store's tokenizer, which has the digest `digest` (None: no check).

    Raises:
        UserError: the tokenizer does not exist, or has another digest.
    """
    tokenizer = Tokenizer.load(path)
    if digest not in (None, tokenizer.digest):
        raise UserError(
            f"the store was packed with another tokenizer (digest {digest[:16]}); set --tokenizer to that tokenizer",
            path,
        )
    return tokenizer


def byte_table(file: Path, vocab_size: int) -> np.ndarray | None:
    """Returns the number of bytes of text of each id `[vocab_size]`, or None if the tokenizer is not byte-level.

    In a byte-level vocabulary, each character of a token's name stands for one byte of the token's text.
    """
    try:
        content = json.loads(file.read_bytes())
        decoder = content.get("decoder") or {}
        vocabulary = content["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # With a normalizer, this counts the normalized text, because the original text cannot be recovered from the ids.
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
