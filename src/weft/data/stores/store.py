"""The token store: Megatron's indexed dataset with `store.json` beside it, which says what the tokens are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from weft.data.stores.indexed import IndexedReader, map_file
from weft.errors import UserError
from weft.files import read_json
from weft.headers import read_store_header


class CutFile(BaseModel):
    """Of a shard's first or last file: whether there is more of it in the shards before and after, and its units'
    digests."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    before: bool
    after: bool
    digests: list[str]


class SourceFile(BaseModel):
    """One input file: its size in bytes, its sha256 (of a file read in several units: that of their digests), the
    documents and rejects that it gave, and why it was skipped if it is no text at all."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    path: str
    size: int
    sha256: str
    documents: int
    rejected: int = 0
    skipped: str | None = None
    cut: CutFile | None = None


class StoreInfo(BaseModel):
    """`store.json`. `documents + sum(rejected.values())` is the number of documents in the sources.

    Besides, it has digests that only `weft data verify` looks at: its own, and those of the rejects and duplicates.

    Attributes:
        tokenizer_digest: None for a store converted from another tool's without naming the tokenizer.
        bytes: of the documents' text in UTF-8, without end-of-document tokens; None where nobody counted them.
        empty_documents: packed documents without text.
        blank_lines: of JSON-lines files; no documents.
        rejected: reason -> count.
        notes: what happened to documents that were kept -> count.
        kind: what a document is: text; a conversation with a loss mask; or, two by two, a chosen and a rejected one.
        mask_sha256: of `loss_mask.bin`, where there is one.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    version: int = 1
    kind: Literal["text", "conversations", "preferences"] = "text"
    tokenizer_digest: str | None
    vocab_size: int
    eod_id: int
    dtype: str
    documents: int
    tokens: int
    bytes: int | None
    empty_documents: int = 0
    blank_lines: int = 0
    rejected: dict[str, int] = {}
    skipped_files: dict[str, int] = {}
    notes: dict[str, int] = {}
    bin_sha256: str
    idx_sha256: str
    mask_sha256: str | None = None
    sources: list[SourceFile] = []

    @property
    def digest(self) -> str:
        """Of the tokens: what a run's manifest names."""
        return self.bin_sha256

    @property
    def item_documents(self) -> int:
        """Documents that belong together and are never parted: a preference's chosen and rejected one, else one."""
        return 2 if self.kind == "preferences" else 1


class TokenStore:
    """An opened store.

    Attributes:
        tokens: `[num_tokens]`, a memory map.
        lengths, offsets: tokens per document and their first byte `[num_documents]`, memory maps.
        loss_mask: uint8 `[num_tokens]`, 1 where a token is to be learned; None where all are.
    """

    def __init__(self, path: Path, info: StoreInfo, reader: IndexedReader):
        self.path, self.info, self._reader = path, info, reader
        self.tokens, self.lengths, self.offsets = reader.tokens, reader.lengths, reader.offsets
        self.loss_mask = None
        if info.mask_sha256 is not None:
            mask = path / "loss_mask.bin"
            size = mask.stat().st_size if mask.exists() else 0
            if size != len(reader.tokens):
                raise UserError(
                    f"{size:,} bytes where {len(reader.tokens):,} belong; it is damaged: pack the store again", mask
                )
            self.loss_mask = map_file(mask, np.uint8, 0, size)
        self.num_tokens, self.num_documents = len(reader.tokens), len(reader.lengths)

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Open a store; headers and sizes are checked, nothing is read.

        Raises:
            UserError: no store, or a damaged one.
        """
        folder = Path(path)
        read_store_header(folder)
        try:
            info = StoreInfo.model_validate(read_json(folder / "store.json"))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise UserError(f"{key}: {first['msg']}; pack the store again", folder / "store.json") from None
        return cls(folder, info, IndexedReader(folder / "tokens"))

    def document(self, number: int) -> np.ndarray:
        """The ids of one document, its end-of-document token among them."""
        return self._reader.document(number)
