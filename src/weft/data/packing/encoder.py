"""Documents to token ids: what `pack` asks of an encoder, and the one for plain text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.data.documents import Document, Reject
from weft.headers import tokenizer_file

if TYPE_CHECKING:
    import numpy as np

    from weft.data.tokenizers.tokenizer import Tokenizer


@dataclass
class Encoded:
    """A batch of documents as ids.

    Attributes:
        ids: all documents' ids end to end `[tokens]`, end-of-document tokens among them.
        lengths: of each document `[documents]`; their sum is `len(ids)`.
        mask: uint8 `[tokens]`, 1 where a token is to be learned; None where all are.
        rejects: documents that the encoder cannot take, by their `line`; they have no length above.
        notes: what happened to documents that were kept ("cut to 512 tokens") -> how many.
        bytes: of the text that records became, in UTF-8, without end-of-document tokens; None where texts were read.
    """

    ids: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None = None
    rejects: list[Reject] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    bytes: int | None = None


class Encoder(Protocol):
    """Turns documents into ids. It travels to worker processes by pickle before it is opened there: making one is
    cheap, and what is heavy is loaded by the first `open` or `encode`.

    Attributes:
        kind: of the store: "text", "conversations" or "preferences" (two documents for each one read).
        has_mask: whether `encode` gives loss masks.
    """

    kind: str
    has_mask: bool

    def open(self) -> Tokenizer:
        """The tokenizer, loaded once."""
        ...

    def identity(self) -> dict[str, Any]:
        """What the ids depend on, as JSON: two encoders of the same identity give the same ids."""
        ...

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """The ids of some documents, in their order; the same whatever the batch that a document is in."""
        ...

    def as_exact(self) -> Encoder:
        """The same with every text sent through the reference library."""
        ...


class TextEncoder:
    """Texts by a tokenizer; one end-of-document token closes each.

    Args:
        tokenizer: its folder (or file), or a tokenizer that is open already.
        exact: send every text through the reference library.
    """

    kind, has_mask = "text", False

    def __init__(self, tokenizer: str | Path | Tokenizer, *, exact: bool = False):
        if isinstance(tokenizer, str | Path):
            self._opened: Tokenizer | None = None
            self.path, self.exact = Path(tokenizer), exact
        else:
            self._opened, self.path, self.exact = tokenizer, tokenizer.path, exact or tokenizer.exact

    def __reduce__(self):
        return _text_encoder, (self.path, self.exact)

    def open(self) -> Tokenizer:
        """The tokenizer, loaded once.

        Raises:
            UserError: there is none, it is broken, or it states no end-of-document token.
        """
        if self._opened is None:
            from weft.data.tokenizers.tokenizer import Tokenizer

            self._opened = Tokenizer.load(self.path, exact=self.exact)
        return self._opened

    def identity(self) -> dict[str, Any]:
        """What the ids depend on, as JSON."""
        # As `Tokenizer.digest`, which takes longer to open than many a pack.
        digest = hashlib.sha256(tokenizer_file(self.path).read_bytes()).hexdigest()
        return {"kind": self.kind, "tokenizer_digest": digest, "exact": self.exact}

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """The ids of some texts, each closed by the end-of-document token."""
        tokenizer = self.open()
        texts: list[Any] = [document.value for document in documents]
        return Encoded(*tokenizer.encode_batch(texts, close=True))

    def as_exact(self) -> TextEncoder:
        """The same with every text sent through the `tokenizers` library."""
        return TextEncoder(self.path, exact=True)


def _text_encoder(path: Path, exact: bool) -> TextEncoder:
    return TextEncoder(path, exact=exact)
