"""A look at a token store: counts, lengths as a picture, decoded samples. Large ones are sampled: it is instant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.data.conversations.show_mask import with_mask
from weft.data.stores.indexed import release_pages
from weft.data.stores.operations.text_bytes import open_tokenizer
from weft.data.stores.store import TokenStore
from weft.files import read_json
from weft.formatting import counted

BAR = 40  # characters of the longest bar
LOOKED_AT, RUNS = 1 << 24, 64  # numbers that are read at most, in how many places


def describe(path: Path, tokenizer: str | Path | None, *, samples: int) -> Iterator[str]:
    """Lines that describe the store at `path`.

    Args:
        tokenizer: decodes the samples; without it they are shown as ids.

    Raises:
        UserError: no store, a damaged one, or the wrong tokenizer.
    """
    store = TokenStore(path)
    info = store.info
    kind = "" if info.kind == "text" else f" of {info.kind}"
    documents, tokens = counted(store.num_documents, "document"), counted(store.num_tokens, "token")
    yield f"{path}: {documents}{kind}, {tokens} ({info.dtype})"
    if info.bytes is None:
        yield "text       its bytes were not counted (--tokenizer lets the operation that made it count)"
    else:
        yield f"text       {counted(info.bytes, 'byte')}, {info.bytes / max(1, store.num_tokens):.2f} bytes per token"
    named = info.tokenizer_digest[:16] if info.tokenizer_digest is not None else "not stated"
    yield f"vocabulary {info.vocab_size:,}, end of document {info.eod_id}, tokenizer {named}"
    yield f"digest     {info.digest[:16]}"
    if store.loss_mask is not None:
        mask, whole = looked_at(store.loss_mask)
        share = np.count_nonzero(mask) / max(1, len(mask))
        yield f"loss mask  {'' if whole else 'about '}{share:.1%} of the tokens are learned"
    empty = f"{counted(info.empty_documents, 'empty document')}, {counted(info.blank_lines, 'blank line')}"
    rejected = ", ".join(f"{number:,} rejected ({reason})" for reason, number in info.rejected.items())
    yield f"of these   {empty}" + (f", {rejected}" if rejected else "")
    yield from made_from(path)
    lengths, whole = looked_at(store.lengths)
    if not whole:
        yield f"           lengths of {counted(len(lengths), 'document')} in {RUNS} places:"
    yield from histogram(lengths)
    decoder = open_tokenizer(tokenizer, info.tokenizer_digest) if tokenizer is not None else None
    for number in np.linspace(0, store.num_documents - 1, max(0, min(samples, store.num_documents))).astype(int):
        ids = store.document(int(number))
        if decoder is None:
            shown = " ".join(map(str, ids[:24]))
        elif store.loss_mask is None:
            shown = repr(decoder.decode(ids[:60].tolist()))
        else:  # more of it, for what is learned comes late; {+ and +} are around that
            start = int(store.offsets[number]) // store.tokens.itemsize
            shown = repr(with_mask(ids[:240], store.loss_mask[start : start + len(ids)][:240], decoder.decode))
        limit = 60 if decoder is None or store.loss_mask is None else 240
        yield f"document {number:,} ({counted(len(ids), 'token')}): {shown}{' ...' if len(ids) > limit else ''}"


def looked_at(array: np.ndarray) -> tuple[np.ndarray, bool]:
    """All of an array; or, of a large one, evenly spaced runs, and False."""
    if len(array) <= LOOKED_AT:
        return np.array(array), True
    starts = np.linspace(0, len(array) - LOOKED_AT // RUNS, RUNS).astype(int)
    found = np.concatenate([array[start : start + LOOKED_AT // RUNS] for start in starts])
    release_pages(array)
    return found, False


def made_from(path: Path) -> Iterator[str]:
    """What a store says of how it was made, unless it was packed from text."""
    made = read_json(path / "store.json").get("made_from")
    if not isinstance(made, dict) or "operation" not in made:
        return
    inputs = made.get("input") or {}
    digest = str(inputs.get("bin_sha256", ""))[:16] if isinstance(inputs, dict) else ""
    details = ", ".join(f"{k} {v}" for k, v in made.items() if k not in ("operation", "input") and v is not None)
    yield f"made by    {made['operation']}{f' of {digest}' if digest else ''}" + (f" ({details})" if details else "")


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
