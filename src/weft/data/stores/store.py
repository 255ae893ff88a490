"""Opens token stores. A token store is a folder with a Megatron indexed dataset and its description, `store.json`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from weft.data.stores.field_files import field_file
from weft.data.stores.indexed import map_file
from weft.errors import UserError
from weft.files import read_json
from weft.headers import HEADER, read_store_header


class PartialFile(BaseModel):
    """The part of an input file that one shard of a token store contains, for a file that is split between shards.

    A unit is a range of a file, such as lines of JSON lines or row groups of Parquet, that one worker packs.

    Attributes:
        before: whether the previous shard packed earlier units of the file.
        after: whether the next shard packed later units of the file.
        digests: digests of the file's units in this shard.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    before: bool
    after: bool
    digests: list[str]


class SourceFile(BaseModel):
    """An input file of a store.

    Attributes:
        size: size of the file in bytes.
        sha256: digest of the file's bytes, or of its units' digests if the file was read in several units.
        documents: number of documents packed from the file.
        rejected: number of rejected documents of the file.
        skipped: reason why the file was skipped (such as "binary"); None if it was read.
        cut: which part of the file this shard packed; None if the shard packed the complete file.
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
    """Content of `store.json`.

    `documents + sum(rejected.values())` is the number of documents in the sources. Packed preferences are an exception,
    because each record becomes two documents. The file also contains digests of itself, of `rejects.jsonl` and of
    `duplicates.jsonl`, which only `weft data verify` reads.

    Attributes:
        kind: content of the documents: plain text, conversations with a loss mask, or preferences. Preferences are
            pairs of documents: first the one with the chosen answer, then the one with the rejected answer.
        chat_template: source of the chat template that rendered the conversations; None if the documents are texts, or
            if merged stores have different templates.
        tokenizer_digest: digest of the tokenizer; None if the store was converted without naming a tokenizer.
        documents, tokens: number of documents and of tokens in the store.
        bytes: UTF-8 size of the documents' text, without end-of-document tokens; None if the bytes were not counted.
        empty_documents: number of packed documents without text.
        blank_lines: number of blank lines in JSON Lines files, which are not documents.
        rejected: reason -> number of documents that were rejected or, by an operation such as `filter`, left out.
        skipped_files: reason -> number of skipped files.
        notes: what was done to documents (such as "truncated to 512 tokens") -> number of documents.
        bin_sha256, idx_sha256, mask_sha256: digests of `tokens.bin`, `tokens.idx` and `loss_mask.bin`; `mask_sha256` is
            None if the store has no loss mask.
        fields: name of a field of the documents, such as "label" -> digest of its file (`field_files.py`).
        sample_sha256: digest of blocks of the files (`sample_digest`); None in stores of earlier versions.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    version: int = 1
    kind: Literal["text", "conversations", "preferences"] = "text"
    chat_template: str | None = None
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
    fields: dict[str, str] = {}
    sample_sha256: str | None = None
    sources: list[SourceFile] = []

    @property
    def digest(self) -> str:
        """The digest of the tokens, and of the loss mask and fields if there are any. A run's manifest records it."""
        if self.mask_sha256 is None and not self.fields:
            return self.bin_sha256
        fields = (f"{name}={digest}" for name, digest in sorted(self.fields.items()))
        return hashlib.sha256(" ".join([self.bin_sha256, str(self.mask_sha256), *fields]).encode()).hexdigest()

    @property
    def identity(self) -> list[str]:
        """What identifies the documents: the digests of their contents and of their lengths, and the kind."""
        return [self.digest, self.idx_sha256, self.kind]

    @property
    def item_documents(self) -> int:
        """Number of documents per item: 2 for preferences (chosen and rejected), else 1. An item is never split."""
        return 2 if self.kind == "preferences" else 1


class TokenStore:
    """A token store opened for reading. Opening reads only headers, so it is fast for stores of any size.

    Attributes:
        tokens: all tokens `[num_tokens]`, a memory map.
        lengths: number of tokens of each document `[num_documents]`, a memory map.
        offsets: byte offset of each document in `tokens.bin` `[num_documents]`, a memory map.
        loss_mask: uint8 `[num_tokens]`, 1 for tokens that are trained on; None if all tokens are trained on.
        fields: name -> number of each document, float32 `[num_documents]`, a memory map.

    Raises:
        UserError: the folder is not a token store, or the store is damaged.
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
        self.fields = {}
        for name in self.info.fields:
            values = self.path / field_file(name)
            _check_size(values, 4 * self.num_documents)
            self.fields[name] = map_file(values, np.dtype("<f4"), 0, self.num_documents)

    def document(self, number: int) -> np.ndarray:
        """Returns the ids of one document, including its end-of-document token."""
        start = int(self.offsets[number]) // self.tokens.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]


def _check_size(file: Path, expected: int) -> None:
    size = file.stat().st_size if file.exists() else 0
    if size != expected:
        raise UserError(f"damaged: it has {size:,} bytes instead of {expected:,}; pack the store again", file)
