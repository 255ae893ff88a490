"""The token store: a Megatron indexed dataset and a `store.json` that describes its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from weft.data.stores.indexed import map_file
from weft.errors import UserError
from weft.files import read_json
from weft.headers import HEADER, read_store_header


class PartialFile(BaseModel):
    """A shard's first or last file, if the shard has only some of its units.

    Attributes:
        before, after: whether the previous or the next shard has other units of the file.
        digests: of this shard's units.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    before: bool
    after: bool
    digests: list[str]


class SourceFile(BaseModel):
    """One input file.

    Attributes:
        size: in bytes.
        sha256: of the file; of a file read in several units, of the units' digests.
        skipped: why the file was skipped, if it is not text.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    path: str
    size: int
    sha256: str
    documents: int
    rejected: int = 0
    skipped: str | None = None
    cut: PartialFile | None = None


class StoreInfo(BaseModel):
    """`store.json`. `documents + sum(rejected.values())` is the number of documents in the sources.

    The file also has digests that only `weft data verify` reads: of itself, the rejects and the duplicates.

    Attributes:
        tokenizer_digest: None for a store converted from an external format without naming the tokenizer.
        bytes: of the documents' text in UTF-8, without end-of-document tokens; None if not counted.
        empty_documents: packed documents without text.
        blank_lines: blank lines of JSON Lines files, which are not documents.
        rejected: reason -> count.
        notes: change made to packed documents, such as truncation -> count.
        kind: of each document: text, a conversation with a loss mask, or alternately a chosen and a rejected answer.
        mask_sha256: of `loss_mask.bin`, if there is one.
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
        """Digest of the tokens, recorded in a run's manifest."""
        return self.bin_sha256

    @property
    def item_documents(self) -> int:
        """Documents per item. An item is never split: 2 for preferences (chosen and rejected), else 1."""
        return 2 if self.kind == "preferences" else 1


class TokenStore:
    """A token store opened for reading. Opening reads only headers, so its time does not depend on the size.

    Attributes:
        tokens: all tokens `[num_tokens]`, a memory map.
        lengths, offsets: tokens and first byte of each document `[num_documents]`, memory maps.
        loss_mask: uint8 `[num_tokens]`, 1 for tokens that are trained on; None if all are.

    Raises:
        UserError: not a token store, or a damaged one.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        header = read_store_header(self.path)
        file, index, data = (self.path / name for name in ("store.json", "tokens.idx", "tokens.bin"))
        try:
            self.info = StoreInfo.model_validate(read_json(file))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise UserError(f"{key}: {first['msg']}; pack the store again", file) from None
        self.num_tokens, self.num_documents = header.num_tokens, header.num_documents
        dtype = np.dtype(self.info.dtype)
        self.lengths = map_file(index, np.int32, HEADER.size, self.num_documents)
        self.offsets = map_file(index, np.int64, HEADER.size + 4 * self.num_documents, self.num_documents)
        # Documents are contiguous, so the last one ends the tokens; `weft data verify` checks all of them.
        end = int(self.offsets[-1]) + int(self.lengths[-1]) * dtype.itemsize if self.num_documents else 0
        _check_size(data, end)
        self.tokens = map_file(data, dtype, 0, self.num_tokens)
        self.loss_mask = None
        if self.info.mask_sha256 is not None:
            mask = self.path / "loss_mask.bin"
            _check_size(mask, self.num_tokens)
            self.loss_mask = map_file(mask, np.uint8, 0, self.num_tokens)

    def document(self, number: int) -> np.ndarray:
        """Returns the ids of one document, including its end-of-document token."""
        start = int(self.offsets[number]) // self.tokens.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]


def _check_size(file: Path, expected: int) -> None:
    size = file.stat().st_size if file.exists() else 0
    if size != expected:
        raise UserError(f"damaged: {size:,} bytes instead of {expected:,}; pack the store again", file)
