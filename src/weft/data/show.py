"""Shows documents of a token store as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weft.data.conversations.show_mask import MARKS, mask_runs
from weft.data.raw.cache import packed_with
from weft.data.stores.operations.text_bytes import open_tokenizer
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.formatting import counted

# Text can contain escape sequences, which must not recolor the user's terminal.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show(
    path: str | Path,
    tokenizer: str | Path | None = None,
    *,
    numbers: list[int] | None = None,
    samples: int = 3,
    marks: tuple[str, str] | None = MARKS,
) -> Iterator[str]:
    """Yields the text of documents of a token store, each with a line before it that describes the document.

    Args:
        tokenizer: the tokenizer of the store. Default: the one that packed raw data into the user's cache; if it is not
            known, ids are shown.
        numbers: indices of the documents. Default: evenly spaced documents, or pairs of documents in a store of
            preferences.
        samples: number of documents or pairs if `numbers` is None.
        marks: text before and after tokens that are trained on; None: tokens are not marked.

    Raises:
        UserError: the path is not a token store, the tokenizer is not that of the store, or there is no such document.
    """
    store = TokenStore(path)
    folder = tokenizer or packed_with(store.path)
    decoder = open_tokenizer(folder, store.info.tokenizer_digest) if folder is not None else None
    if decoder is None:
        yield "token ids are shown, because the tokenizer is not known; --tokenizer DIR shows text"
    if marks is not None and store.loss_mask is None:
        yield "this store has no loss mask: all tokens are trained on"
    count = store.num_documents
    for number in numbers or []:
        if not 0 <= number < count:
            raise UserError(f"no document {number:,}: the store has {counted(count, 'document')}", path)
    step = store.info.item_documents
    items = np.linspace(0, count // step - 1, min(samples, count // step)).astype(int)
    for number in numbers or (items[:, None] * step + np.arange(step)).flatten().tolist():
        ids = store.document(number)
        start = int(store.offsets[number]) // store.tokens.itemsize
        mask = np.ones(len(ids)) if store.loss_mask is None else store.loss_mask[start : start + len(ids)]
        pair = "" if step == 1 else f": pair {number // 2:,}, {'rejected' if number % 2 else 'chosen'} answer"
        learned = f", {np.count_nonzero(mask):,} trained on" if store.loss_mask is not None else ""
        fields = "".join(f", {name} {values[number]:g}" for name, values in store.fields.items())
        yield f"--- document {number:,}{pair} ({counted(len(ids), 'token')}{learned}{fields})"
        runs = mask_runs(ids, mask, decoder.decode if decoder is not None else _ids)
        plain = marks is None or store.loss_mask is None
        texts = ((CONTROL.sub("", text), known) for text, known in runs)
        yield "".join(text if plain or not known else text.join(marks or MARKS) for text, known in texts)


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) + " "
