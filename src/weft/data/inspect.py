"""A look at a token store: counts, lengths as a picture, decoded samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.config.errors import UserError
from weft.data.store import TokenStore
from weft.data.tokenizer import Tokenizer

BAR = 40  # characters of the longest bar


def describe(path: Path, tokenizer: str | Path | None, *, samples: int, verify: bool) -> Iterator[str]:
    """Lines that describe the store at `path`.

    Args:
        tokenizer: decodes the samples; without it they are shown as ids.
        verify: compare every byte with the digests.

    Raises:
        UserError: no store, a damaged one, or the wrong tokenizer.
    """
    store = TokenStore.open(path)
    info = store.info
    yield f"{path}: {store.num_documents:,} documents, {store.num_tokens:,} tokens ({info.dtype})"
    yield f"text       {info.bytes:,} bytes, {info.bytes / max(1, store.num_tokens):.2f} bytes per token"
    yield f"vocabulary {info.vocab_size:,}, end of document {info.eod_id}, tokenizer {info.tokenizer_digest[:16]}"
    yield f"digest     {info.digest[:16]}" + (", every byte verified" if verify and _verified(path, store) else "")
    empty = f"{info.empty_documents:,} empty documents, {info.blank_lines:,} blank lines"
    rejected = ", ".join(f"{number:,} rejected ({reason})" for reason, number in info.rejected.items())
    yield f"of these   {empty}" + (f", {rejected}" if rejected else "")
    yield from histogram(np.asarray(store.lengths))
    decoder = Tokenizer.load(tokenizer) if tokenizer is not None else None
    if decoder is not None and decoder.digest != info.tokenizer_digest:
        raise UserError(
            f"the store was packed with another tokenizer ({info.tokenizer_digest[:16]}); name that", tokenizer
        )
    for number in np.linspace(0, store.num_documents - 1, max(0, min(samples, store.num_documents))).astype(int):
        ids = store.document(int(number))
        shown = repr(decoder.decode(ids[:60].tolist())) if decoder is not None else " ".join(map(str, ids[:24]))
        yield f"document {number:,} ({len(ids):,} tokens): {shown}{' ...' if len(ids) > 60 else ''}"


def histogram(lengths: np.ndarray) -> Iterator[str]:
    """Document lengths in powers of two, as bars."""
    if len(lengths) == 0:
        return
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    yield f"lengths    {lengths.min():,} to {lengths.max():,}, median {int(np.median(lengths)):,} tokens"
    for power in range(int(powers.min()), len(counts)):
        bar = "#" * int(np.ceil(BAR * counts[power] / counts.max()))
        yield f"  <= {2**power:>9,} {counts[power]:>10,} {bar}"


def _verified(path: Path, store: TokenStore) -> bool:
    for name, expected in (("tokens.bin", store.info.bin_sha256), ("tokens.idx", store.info.idx_sha256)):
        with open(path / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise UserError(
                    "its bytes are not those that were packed; it is damaged: pack the store again", path / name
                )
    return True
