"""Converts token stores between the formats of different tools."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.data.output_folder import STORE, check_apart, check_name, check_out, check_parent, publish
from weft.data.stores.external.detect import detect_format, open_external_store
from weft.data.stores.external.external_store import Documents, ExternalStore
from weft.data.stores.external.pbin import write_pairs
from weft.data.stores.indexed import BLOCK_TOKENS, IndexedWriter, token_dtype
from weft.data.stores.operations.new_store import Output, existing_store
from weft.data.stores.operations.text_bytes import TextBytes
from weft.data.stores.store import SourceFile, StoreInfo, TokenStore
from weft.data.stores.store_json import write_store_json
from weft.errors import UserError
from weft.files import hidden_folder, report_write_errors, sync_tree

LONGEST = 1 << 27  # maximum tokens of a document in a stream, because a document must fit into memory


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        documents, tokens: number of documents and of tokens in the output.
        closed: number of documents to which an end-of-document token was added; 0 if the input does not record its
            number of tokens, even if end-of-document tokens were added.
        linked: whether the files are hard links to the input, so that nothing was copied.
        mask_lost: whether the input had a loss mask, which the output format does not support.
    """

    documents: int
    tokens: int
    closed: int = 0
    linked: bool = False
    mask_lost: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary size, end-of-document id and digest of a tokenizer; None for a value that is unknown."""

    size: int | None = None
    eod_id: int | None = None
    digest: str | None = None


def convert(
    path: Path, source: ExternalStore, output: Output, to: str, vocabulary: Vocabulary, *, recut: bool = False
) -> Converted:
    """Writes the documents of a store in another format.

    Conversion to `weft` adds an end-of-document token to each document that does not end with it. Other conversions do
    not change the ids.

    Args:
        path: path of the input store.
        source: the same store, opened by `open_external_store`.
        output: settings; `output.path` is a folder (weft), the prefix of two files (megatron), or a file (nanogpt,
            pbin). Existing files are replaced only with `output.overwrite`, and only if they have the format `to`.
        to: output format: `weft`, `megatron`, `nanogpt` or `pbin`.
        vocabulary: required for `weft`; if its size is known, every id is checked against the size.
        recut: whether to ignore the input's document boundaries and split its tokens after each end-of-document token.

    Raises:
        UserError: an id is outside the vocabulary (the message names the document), the vocabulary is incomplete, or
            `output.path` exists and must not be replaced.
    """
    out, split = output.path, recut or source.documents is None
    info = TokenStore(path).info if source.format == "weft" else None
    if info is not None:
        eod_id = info.eod_id if vocabulary.eod_id is None else vocabulary.eod_id
        vocabulary = Vocabulary(vocabulary.size or info.vocab_size, eod_id, vocabulary.digest or info.tokenizer_digest)
    size, eod_id = vocabulary.size, vocabulary.eod_id
    if to == "weft" and (size is None or eod_id is None):
        raise UserError("a token store needs a vocabulary; set --tokenizer, or --vocab-size and --eod")
    if recut and eod_id is None:
        raise UserError("--recut needs the end-of-document token; set --tokenizer or --eod")
    if eod_id is not None and (eod_id < 0 or (size is not None and eod_id >= size)):
        raise UserError(f"--eod {eod_id}: must be " + ("0 or more" if size is None else f"an id from 0 to {size - 1}"))
    check_name(out)
    # An external store's folder can contain any other files (it can be "."), so only the store's files are protected.
    inputs = [source.path.with_suffix(end) for end in (".bin", ".idx", source.path.suffix)]
    check_apart(out, [path, *inputs] if source.format == "weft" else inputs)
    if to == "weft":
        return _to_weft(path, output, vocabulary, source, info, split)
    ends = (".bin", ".idx") if to == "megatron" else ("",)
    files = [out.with_name(out.name + end) for end in ends]
    for file in files:
        _check_file(file, to, output.overwrite, inputs)
    linked = False
    with report_write_errors(out), hidden_folder(files[0]) as folder:
        if to == "megatron" and not split and source.format in ("weft", "megatron"):
            linked = _link(source, folder)  # the files are in Megatron's format already
            documents, tokens = source.documents or 0, source.tokens
        else:
            write = {"megatron": _write_megatron, "nanogpt": _write_nanogpt, "pbin": _write_pbin}[to]
            vocab_size = size if size is not None else source.largest + 1
            documents, tokens = write(folder, _documents(source, vocabulary, split, output), vocab_size, source.path)
        sync_tree(folder)
        for end, file in zip(ends, files, strict=True):  # the index last: when it exists, both do
            os.replace(folder / f"out{end}", file)
    return Converted(documents, tokens, linked=linked, mask_lost=info is not None and info.mask_sha256 is not None)


# --- Reading documents ---


def _documents(
    source: ExternalStore, vocabulary: Vocabulary, split: bool, output: Output, *, close: bool = False
) -> Iterator[Documents]:
    """Yields the source's documents, after checking that their token ids are in the vocabulary.

    Args:
        split: whether to split the tokens after each end-of-document token instead of at the source's boundaries.
        close: whether to add an end-of-document token to documents that do not end with it.
    """
    done = number = 0
    with output.console.progress(source.tokens if source.tokens >= 0 else None, "converting", unit="token") as bar:
        for ids, lengths in _split_stream(source, vocabulary.eod_id) if split else source.blocks():
            _check_ids(source, ids, lengths, number, vocabulary.size)
            done, number = done + len(ids), number + len(lengths)
            yield _append_eod(ids, lengths, vocabulary.eod_id) if close else (ids, lengths)
            bar.update(done)


def _check_ids(source: ExternalStore, ids: np.ndarray, lengths: np.ndarray, number: int, size: int | None) -> None:
    """Raises UserError if a block of documents contains an id outside the vocabulary.

    Args:
        number: index of the block's first document in the store, for the message.
        size: size of the vocabulary; None if unknown.
    """
    for start in range(0, len(ids), BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS]
        lowest = int(block.min()) if block.dtype.kind == "i" else 0
        if lowest >= 0 and (size is None or int(block.max()) < size):
            continue
        at = int(np.flatnonzero((block < 0) | (block >= (size if size is not None else np.inf)))[0])
        document = number + int(np.searchsorted(np.cumsum(lengths), start + at, side="right"))
        raise UserError(
            f"document {document:,} contains the id {int(block[at])}, outside the vocabulary of "
            f"{size if size is not None else 2**31:,}; set --tokenizer to the tokenizer of these ids",
            source.path,
        )


def _append_eod(ids: np.ndarray, lengths: np.ndarray, eod_id: int | None) -> Documents:
    """Adds an end-of-document token to each document that does not end with it. Returns the new ids and lengths."""
    ends = np.cumsum(lengths)
    is_open = np.ones(len(lengths), bool)
    full = lengths > 0
    is_open[full] = ids[ends[full] - 1] != eod_id
    if not is_open.any():
        return ids, lengths
    new_lengths = lengths + is_open
    if len(lengths) == 1 and len(ids) > BLOCK_TOKENS:  # a large document: avoids the masks below, which need memory
        out = np.empty(len(ids) + 1, ids.dtype)
        out[:-1], out[-1] = ids, eod_id
        return out, new_lengths
    out = np.full(len(ids) + int(is_open.sum()), eod_id, np.int64)
    old = np.ones(len(out), bool)
    old[(np.cumsum(new_lengths) - 1)[is_open]] = False
    out[old] = ids
    return out, new_lengths


def _split_stream(source: ExternalStore, eod_id: int | None) -> Iterator[Documents]:
    """Splits a stream of ids into documents after each `eod_id`. If `eod_id` is None, the stream is one document."""
    waiting: list[np.ndarray] = []
    for ids, _ in source.blocks():
        ends = np.flatnonzero(ids == eod_id) + 1 if eod_id is not None else np.zeros(0, np.int64)
        if len(ends):
            before = sum(map(len, waiting))
            lengths = np.diff(np.concatenate([[-before], ends]))
            head = np.array(ids[: ends[-1]])
            yield (np.concatenate([*waiting, head]) if waiting else head), lengths
            waiting = []
            ids = ids[ends[-1] :]
        if len(ids):
            waiting.append(np.array(ids))
        if sum(map(len, waiting)) > LONGEST:
            remedy = (
                "set --eod" if eod_id is None else f"check whether {eod_id} is the end-of-document token of these ids"
            )
            raise UserError(f"more than {LONGEST:,} tokens without an end-of-document token; {remedy}", source.path)
    if waiting:
        rest = np.concatenate(waiting)
        yield rest, np.array([len(rest)])


# --- Writing formats ---


def _to_weft(
    path: Path, output: Output, vocabulary: Vocabulary, source: ExternalStore, info: StoreInfo | None, split: bool
) -> Converted:
    out, size, eod_id = output.path, vocabulary.size or 0, vocabulary.eod_id or 0
    made_from = {"operation": "convert", "format": source.format, "size": source.path.stat().st_size,
                 "vocab_size": size, "eod_id": eod_id, "recut": split, "tokenizer": vocabulary.digest}  # fmt: skip
    if info is not None:
        if info.mask_sha256 is not None or info.kind != "text":
            raise UserError(
                "already a token store, and conversion would lose its loss mask; copy the folder instead", path
            )
        made_from["bin_sha256"] = info.bin_sha256
    check_out(out, STORE, overwrite=output.overwrite)
    # The content of external files is unknown before they are read, so an existing store is never up to date.
    existing_store(out, made_from, output.overwrite, reusable=False)
    counter = TextBytes(output.tokenizer, vocabulary.digest, size) if output.tokenizer is not None else None
    with report_write_errors(out), hidden_folder(out) as folder:
        writer, text_bytes = IndexedWriter(folder / "tokens", token_dtype(size)), 0
        for ids, lengths in _documents(source, vocabulary, split, output, close=True):
            writer.add(ids, lengths)
            if counter is not None:
                text_bytes += counter.count(ids, lengths)
        if writer.documents == 0:
            raise UserError("contains no document; nothing was written; check the input", source.path)
        source_file = SourceFile(
            path=str(path), size=source.path.stat().st_size, sha256=info.bin_sha256 if info else "",
            documents=writer.documents,
        )  # fmt: skip
        new_info = StoreInfo(
            tokenizer_digest=vocabulary.digest, vocab_size=size, eod_id=eod_id,
            bytes=text_bytes if counter is not None else None, empty_documents=writer.empty, sources=[source_file],
            **writer.finish(),
        )  # fmt: skip
        write_store_json(folder, {**new_info.model_dump(), "made_from": made_from})
        publish(folder, out)
    closed = writer.tokens - source.tokens if source.tokens >= 0 else 0
    return Converted(writer.documents, writer.tokens, closed)


def _link(source: ExternalStore, folder: Path) -> bool:
    """Hard-links both files of a Megatron dataset into `folder`; copies a file that cannot be linked.

    Returns whether both files were linked.
    """
    linked = True
    for end in (".bin", ".idx"):
        try:
            os.link(source.path.with_suffix(end), folder / f"out{end}")
        except OSError:
            shutil.copyfile(source.path.with_suffix(end), folder / f"out{end}")
            linked = False
    return linked


def _write_megatron(folder: Path, documents: Iterator[Documents], vocab_size: int, origin: Path) -> tuple[int, int]:
    writer = IndexedWriter(folder / "out", token_dtype(vocab_size))
    for ids, lengths in documents:
        writer.add(ids, lengths)
    writer.finish()
    return writer.documents, writer.tokens


def _write_nanogpt(folder: Path, documents: Iterator[Documents], vocab_size: int, origin: Path) -> tuple[int, int]:
    with open(folder / "out", "wb") as file:
        return _write_ids(file, documents, 2, "nanoGPT", origin)


def _write_pbin(folder: Path, documents: Iterator[Documents], vocab_size: int, origin: Path) -> tuple[int, int]:
    width = 1 if vocab_size <= 256 else 2 if vocab_size <= 65536 else 4
    with open(folder / "out", "w+b") as file, open(folder / "lengths", "w+b") as lengths_file:
        file.write((0).to_bytes(8, "little") + width.to_bytes(4, "little"))
        count, tokens = _write_ids(file, documents, width, "Modalities", origin, lengths_file)
        lengths_file.seek(0)
        write_pairs(file, (np.frombuffer(data, "<i8") for data in iter(lambda: lengths_file.read(1 << 24), b"")))
        file.seek(0)
        file.write((tokens * width).to_bytes(8, "little"))
    return count, tokens


def _write_ids(
    file: BinaryIO,
    documents: Iterator[Documents],
    width: int,
    tool: str,
    origin: Path,
    lengths_file: BinaryIO | None = None,
) -> tuple[int, int]:
    """Writes the documents' ids to `file`, `width` bytes each, and the documents' lengths in bytes to `lengths_file`.

    Args:
        tool: name of the tool that defines the format, for messages.
        origin: file of the input store, for messages.
        lengths_file: file for the lengths, int64; None if they are not needed.

    Returns:
        Number of documents and number of tokens.
    """
    count = tokens = 0
    for ids, lengths in documents:
        for start in range(0, len(ids), BLOCK_TOKENS):
            block = ids[start : start + BLOCK_TOKENS]
            if (largest := int(block.max())) >= 1 << 8 * width:
                raise UserError(
                    f"token id {largest} does not fit into the {8 * width} bits of {tool}'s format; use another --to",
                    origin,
                )
            file.write(np.ascontiguousarray(block, f"<u{width}").data)
        if lengths_file is not None:
            lengths_file.write((lengths * width).astype("<i8").tobytes())
        count, tokens = count + len(lengths), tokens + len(ids)
    return count, tokens


def _check_file(file: Path, to: str, overwrite: bool, inputs: list[Path]) -> None:
    """Checks that a file can be written.

    Raises:
        UserError: the folder is missing, the file is an input, or the file exists and is not replaced (`overwrite` is
            false, or its format is not `to`).
    """
    check_parent(file)
    check_apart(file, inputs)
    if not os.path.lexists(file):
        return
    try:
        same_format = file.is_file() and detect_format(file) == to
        if same_format and to == "pbin":
            open_external_store(file, to)
    except UserError:
        same_format = False
    if not same_format:
        raise UserError(f"exists already, and is not a {to} file; choose another --out", file)
    if not overwrite:
        raise UserError("exists already; choose another --out, or replace it with --overwrite", file)
