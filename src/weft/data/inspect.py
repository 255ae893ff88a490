"""Describes a token store: counts, a histogram of lengths, decoded documents. Reads large stores only in part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from weft.data.conversations.show_mask import render_mask
from weft.data.stores.indexed import release_pages
from weft.data.stores.operations.text_bytes import open_tokenizer
from weft.data.stores.store import TokenStore
from weft.files import read_json
from weft.formatting import counted

BAR = 40  # characters of the longest bar
SAMPLE_SIZE, RUNS = 1 << 24, 64  # maximum number of elements to read, in evenly spaced runs


def describe(path: Path, tokenizer: str | Path | None, *, samples: int) -> Iterator[str]:
    """Yields lines that describe the store at `path`.

    Args:
        tokenizer: the tokenizer that decodes the documents to show; None: they are shown as ids.
        samples: number of documents to show.

    Raises:
        UserError: `path` is not a store, the store is damaged, or `tokenizer` is not the tokenizer of the store.
    """
    store = TokenStore(path)
    info = store.info
    kind = "" if info.kind == "text" else f" of {info.kind}"
    documents, tokens = counted(store.num_documents, "document"), counted(store.num_tokens, "token")
    yield f"{path}: {documents}{kind}, {tokens} ({info.dtype})"
    if info.bytes is None:
        yield "text       bytes not counted (give --tokenizer to the operation that created the store)"
    else:
        yield f"text       {counted(info.bytes, 'byte')}, {info.bytes / max(1, store.num_tokens):.2f} bytes per token"
    named = info.tokenizer_digest[:16] if info.tokenizer_digest is not None else "not stated"
    yield f"vocabulary {info.vocab_size:,}, end of document {info.eod_id}, tokenizer {named}"
    yield f"digest     {info.digest[:16]}"
    if store.loss_mask is not None:
        mask, complete = sample_array(store.loss_mask)
        share = np.count_nonzero(mask) / max(1, len(mask))
        yield f"loss mask  {'' if complete else 'about '}{share:.1%} of the tokens are learned"
    for name, values in store.fields.items():
        found, complete = sample_array(values)
        about = "" if complete else "about "
        yield (
            f"field      {name}: {about}{found.min():g} to {found.max():g}, mean {found.mean():g}"
            if len(found)
            else name
        )
    empty = f"{counted(info.empty_documents, 'empty document')}, {counted(info.blank_lines, 'blank line')}"
    rejected = ", ".join(f"{number:,} rejected ({reason})" for reason, number in info.rejected.items())
    yield f"input      {empty}" + (f", {rejected}" if rejected else "")
    yield from _describe_origin(path)
    lengths, complete = sample_array(store.lengths)
    if not complete:
        yield f"           lengths of {counted(len(lengths), 'document')} in {RUNS} parts of the store:"
    yield from _histogram(lengths)
    decoder = open_tokenizer(tokenizer, info.tokenizer_digest) if tokenizer is not None else None
    for number in np.linspace(0, store.num_documents - 1, max(0, min(samples, store.num_documents))).astype(int):
        ids = store.document(int(number))
        limit = 60
        if decoder is None:
            shown = " ".join(map(str, ids[:24]))
        elif store.loss_mask is None:
            shown = repr(decoder.decode(ids[:limit].tolist()))
        else:  # more tokens, because the learned ones come late; {+ and +} enclose them
            limit = 240
            start = int(store.offsets[number]) // store.tokens.itemsize
            shown = repr(render_mask(ids[:limit], store.loss_mask[start : start + len(ids)][:limit], decoder.decode))
        yield f"document {number:,} ({counted(len(ids), 'token')}): {shown}{' ...' if len(ids) > limit else ''}"


def sample_array(array: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns a sample of an array's elements, and whether the sample contains all elements.

    The sample of an array of more than SAMPLE_SIZE elements consists of RUNS evenly spaced runs of elements.
    """
    if len(array) <= SAMPLE_SIZE:
        return np.array(array), True
    starts = np.linspace(0, len(array) - SAMPLE_SIZE // RUNS, RUNS).astype(int)
    sample = np.concatenate([array[start : start + SAMPLE_SIZE // RUNS] for start in starts])
    release_pages(array)
    return sample, False


def _describe_origin(path: Path) -> Iterator[str]:
    """Yields a line about the operation that created the store; no line for a packed or merged store."""
    made = read_json(path / "store.json").get("made_from")
    if not isinstance(made, dict) or "operation" not in made:
        return
    inputs = made.get("input") or {}
    digest = str(inputs.get("bin_sha256", ""))[:16] if isinstance(inputs, dict) else ""
    details = ", ".join(f"{k} {v}" for k, v in made.items() if k not in ("operation", "input") and v is not None)
    yield f"made by    {made['operation']}{f' of {digest}' if digest else ''}" + (f" ({details})" if details else "")


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """Yields lines of text that show a histogram of document lengths. The bins end at powers of two."""
    if len(lengths) == 0:
        return
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    yield f"lengths    {lengths.min():,} to {lengths.max():,}, median {int(np.median(lengths)):,} tokens"
    for power in range(int(powers.min()), len(counts)):
        bar = "#" * int(np.ceil(BAR * counts[power] / counts.max()))
        yield f"  <= {2**power:>9,} {counts[power]:>10,} {bar}"
