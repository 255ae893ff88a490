"""The interface of an encoder, which `pack` uses to convert documents to token ids, and the encoder for texts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.data.documents import Document, Reject
from weft.headers import tokenizer_file

if TYPE_CHECKING:
    import numpy as np

    from weft.data.tokenizers.tokenizer import Tokenizer


@dataclass
class Encoded:
    """A batch of encoded documents.

    Attributes:
        ids: the ids of all documents, concatenated `[tokens]`, including end-of-document tokens.
        lengths: tokens of each document `[documents]`; the sum is `len(ids)`.
        mask: loss mask `[tokens]`, uint8, 1 for tokens to learn; None: all tokens.
        rejects: documents that cannot be encoded, identified by `line`; they have no entry in `lengths`.
        notes: counts of what was done to documents that were kept ("cut to 512 tokens").
        bytes: UTF-8 bytes of the text that records were converted to, without end-of-document tokens; None for texts.
    """

    ids: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None = None
    rejects: list[Reject] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    bytes: int | None = None


class Encoder(Protocol):
    """Converts documents to token ids.

    An encoder is pickled and sent to worker processes before it is opened. So construction is cheap, and the first call
    of `open` or `encode` loads what is large.

    Attributes:
        kind: of the store: "text", "conversations" or "preferences" (two documents per input document).
        has_mask: whether `encode` returns loss masks.
    """

    kind: str
    has_mask: bool

    def open(self) -> Tokenizer:
        """Returns the tokenizer, loaded at the first call."""
        ...

    def identity(self) -> dict[str, Any]:
        """Returns, as JSON, all that the ids depend on: encoders of equal identity return equal ids."""
        ...

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Encodes documents in order. The ids of a document do not depend on the rest of the batch."""
        ...

    def as_exact(self) -> Encoder:
        """Returns the same encoder, using only the reference library."""
        ...


class TextEncoder:
    """Encodes texts with a tokenizer, and appends an end-of-document token to each.

    Args:
        tokenizer: a tokenizer, its folder or its file.
        exact: encode every text with the reference library, `tokenizers`.
    """

    kind, has_mask = "text", False

    def __init__(self, tokenizer: str | Path | Tokenizer, *, exact: bool = False):
        if isinstance(tokenizer, str | Path):
            self._opened: Tokenizer | None = None
            self.path, self.exact = Path(tokenizer), exact
        else:
            self._opened, self.path, self.exact = tokenizer, tokenizer.path, exact or tokenizer.exact

    def __reduce__(self):
        return partial(TextEncoder, exact=self.exact), (self.path,)

    def open(self) -> Tokenizer:
        """Returns the tokenizer; raises UserError if there is none or it states no end-of-document token."""
        if self._opened is None:
            from weft.data.tokenizers.tokenizer import Tokenizer

            self._opened = Tokenizer.load(self.path, exact=self.exact)
        return self._opened

    def identity(self) -> dict[str, Any]:
        # Equal to `Tokenizer.digest`, without loading the tokenizer, which can take longer than the pack itself.
        digest = hashlib.sha256(tokenizer_file(self.path).read_bytes()).hexdigest()
        return {"kind": self.kind, "tokenizer_digest": digest, "exact": self.exact}

    def encode(self, documents: Sequence[Document]) -> Encoded:
        texts: list[Any] = [document.value for document in documents]
        return Encoded(*self.open().encode_batch(texts, close=True))

    def as_exact(self) -> TextEncoder:
        return TextEncoder(self.path, exact=True)
