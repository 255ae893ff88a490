"""Defines the interface of encoders, with which `pack` converts documents to token ids, and the encoder for texts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.data.documents import Document, Reject
from weft.data.option_names import COMMAND, OptionNames
from weft.headers import tokenizer_file

if TYPE_CHECKING:
    import numpy as np

    from weft.data.tokenizers.tokenizer import Tokenizer


@dataclass
class Encoded:
    """A batch of encoded documents.

    Attributes:
        ids: the ids of all documents, concatenated `[tokens]`, including end-of-document tokens.
        lengths: number of tokens of each document `[documents]`; the sum is `len(ids)`.
        mask: loss mask `[tokens]`, uint8, 1 for tokens that are trained on; None: all tokens are trained on.
        rejects: documents that are not encoded, identified by `Document.line`; they have no entry in `lengths`.
        notes: change of encoded documents (such as "truncated to 512 tokens") -> number of these documents.
        bytes: number of UTF-8 bytes of the text to which records were converted, without end-of-document tokens; None
            for texts.
        fields: name -> number of each document, float32 `[documents]`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None = None
    rejects: list[Reject] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    bytes: int | None = None
    fields: dict[str, np.ndarray] = field(default_factory=dict)


class Encoder(Protocol):
    """Converts documents to token ids.

    An encoder is pickled and sent to worker processes before it is opened. So the constructor must be cheap; the first
    call of `open` or `encode` loads the tokenizer.

    Attributes:
        kind: kind of the store: "text", "conversations" or "preferences" (two documents per input document).
        has_mask: whether `encode` returns loss masks.
        fields: names of the fields that `encode` returns: one number per document, such as a label.
        drops: values of `Reject.reason`. A document that `encode` rejects for one of these reasons is left out and
            never stops the pack, because the encoder's settings ask for this (for example, to drop long documents).
        words: names of options in messages.
        chat_template: source of the chat template with which the encoder renders conversations; None: no template.
    """

    kind: str
    has_mask: bool
    fields: Sequence[str]
    drops: Sequence[str]

    @property
    def words(self) -> OptionNames: ...

    @property
    def chat_template(self) -> str | None: ...

    def open(self) -> Tokenizer:
        """Returns the tokenizer. The first call loads it."""
        ...

    def identity(self) -> dict[str, Any]:
        """Returns, as JSON values, everything that determines the ids: encoders of equal identity return equal ids."""
        ...

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Encodes documents in order. The ids of a document do not depend on the other documents."""
        ...

    def as_exact(self) -> Encoder:
        """Returns an encoder with the same settings that uses only the `tokenizers` library, not gigatoken."""
        ...


def tokenizer_digest(path: str | Path) -> str:
    """Returns `Tokenizer.digest` without loading the tokenizer, which can take longer than a pack."""
    return hashlib.sha256(tokenizer_file(path).read_bytes()).hexdigest()


class TextEncoder:
    """Encodes texts with a tokenizer, and appends an end-of-document token to each text.

    Args:
        tokenizer: a tokenizer, the path of its folder, or the path of its tokenizer.json.
        exact: whether to encode every text with the `tokenizers` library, not with gigatoken.
        words: names of options in messages.
    """

    kind, has_mask, chat_template = "text", False, None
    fields: Sequence[str] = ()
    drops: Sequence[str] = ()

    def __init__(self, tokenizer: str | Path | Tokenizer, *, exact: bool = False, words: OptionNames = COMMAND):
        self.words = words
        if isinstance(tokenizer, str | Path):
            self._opened: Tokenizer | None = None
            self.path, self.exact = Path(tokenizer), exact
        else:
            self._opened, self.path, self.exact = tokenizer, tokenizer.path, exact or tokenizer.exact

    def __reduce__(self):
        return partial(TextEncoder, exact=self.exact, words=self.words), (self.path,)

    def open(self) -> Tokenizer:
        """Returns the tokenizer; raises UserError if it does not exist or has no end-of-document token."""
        if self._opened is None:
            from weft.data.tokenizers.tokenizer import Tokenizer

            self._opened = Tokenizer.load(self.path, exact=self.exact)
        return self._opened

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokenizer_digest": tokenizer_digest(self.path), "exact": self.exact}

    def encode(self, documents: Sequence[Document]) -> Encoded:
        texts: list[Any] = [document.value for document in documents]
        return Encoded(*self.open().encode_batch(texts, close=True))

    def as_exact(self) -> TextEncoder:
        return TextEncoder(self.path, exact=True, words=self.words)
