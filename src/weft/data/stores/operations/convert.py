"""Token stores from one tool's format into another's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weft.data.output_folder import STORE, check_apart, check_name, check_out, check_parent, publish
from weft.data.stores.external.detect import detect, open_foreign
from weft.data.stores.external.external_store import Documents, Foreign
from weft.data.stores.indexed import BLOCK_TOKENS, IndexedWriter, token_dtype
from weft.data.stores.operations.new_store import Output, up_to_date, write_info
from weft.data.stores.operations.text_bytes import TextBytes
from weft.data.stores.store import SourceFile, StoreInfo, TokenStore
from weft.errors import UserError
from weft.files import hidden_folder, sync_tree, unwritable

LONGEST = 1 << 27  # tokens of a document that is cut out of a stream: it has to be in memory


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        closed: documents that had no end-of-document token and were given one.
        linked: the files are the same ones under another name (hard links): no byte was copied.
        mask_lost: the store had a loss mask, for which the other format has no place.
    """

    format: str
    documents: int
    tokens: int
    closed: int = 0
    linked: bool = False
    mask_lost: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """What the ids mean, as far as it is known."""

    size: int | None = None
    eod_id: int | None = None
    digest: str | None = None


def convert(
    path: Path, output: Output, to: str, vocabulary: Vocabulary, *, source: Foreign | None = None, recut: bool = False
) -> Converted:
    """Write the documents of a store in another format.

    To `weft`, each document is closed with one end-of-document token if it is not already; else ids stay as they are.

    Args:
        output: its path is a folder (weft), the prefix of two files (megatron), or a file (nanogpt, pbin); what is
            there is replaced only if it is of the format that is written.
        vocabulary: needed for `weft`; its size is checked against every id, wherever it is known.
        source: what `open_foreign` gave for `path`.
        recut: forget the input's documents and cut its stream of tokens behind each end-of-document token.

    Raises:
        UserError: not a store, an id outside of the vocabulary (with its document), something else at the output.
    """
    source, out = source or open_foreign(path), output.path
    cut = recut or source.documents is None
    masked = False
    if source.format == "weft":
        info = TokenStore.open(path).info
        masked = info.mask_sha256 is not None
        vocabulary = Vocabulary(
            vocabulary.size or info.vocab_size, info.eod_id if vocabulary.eod_id is None else vocabulary.eod_id,
            vocabulary.digest or info.tokenizer_digest,
        )  # fmt: skip
    if to == "weft" and (vocabulary.size is None or vocabulary.eod_id is None):
        raise UserError("a store says what its ids mean; name the --tokenizer, or --vocab-size and --eod")
    if recut and vocabulary.eod_id is None:
        raise UserError("to cut the documents anew, name the --tokenizer or --eod")
    if not 0 <= (vocabulary.eod_id or 0) < (vocabulary.size or 1 << 62):
        raise UserError(f"--eod {vocabulary.eod_id}: not an id of a vocabulary of {vocabulary.size:,}")
    check_name(out)
    # A folder of another tool's may be the one that all is in, such as ".".
    read = [source.path.with_suffix(end) for end in (".bin", ".idx", source.path.suffix)]
    check_apart(out, [path, *read] if source.format == "weft" else read)
    if to == "weft":
        return _to_weft(path, output, vocabulary, source, cut)
    for end in (".bin", ".idx") if to == "megatron" else ("",):
        _check_file(out.with_name(out.name + end), to, output.overwrite, read)
    # A store of ours is Megatron's files already.
    if to == "megatron" and not cut and source.format in ("weft", "megatron"):
        return replace(_linked(source, out), mask_lost=masked)
    write: dict[str, Callable] = {"megatron": _to_megatron, "nanogpt": _to_nanogpt, "pbin": _to_pbin}
    made = write[to](source, out, vocabulary, _documents(source, vocabulary, cut, output))
    return replace(made, mask_lost=masked)


def _documents(
    source: Foreign, vocabulary: Vocabulary, cut: bool, output: Output, *, close: bool = False
) -> Iterator[Documents]:
    """The source's documents, checked, and each closed if that is asked for; progress is shown."""
    done = number = 0
    with output.console.progress(source.tokens if source.tokens >= 0 else None, "converting", unit="token") as bar:
        for ids, lengths in _cut(source, vocabulary.eod_id) if cut else source.blocks():
            _check(source, ids, lengths, number, vocabulary.size)
            done, number = done + len(ids), number + len(lengths)
            yield _closed(ids, lengths, vocabulary.eod_id) if close else (ids, lengths)
            bar.update(done)


def _check(source: Foreign, ids: np.ndarray, lengths: np.ndarray, number: int, size: int | None) -> None:
    """All ids of a block are in the vocabulary."""
    for start in range(0, len(ids), BLOCK_TOKENS):
        part = ids[start : start + BLOCK_TOKENS]
        low = int(part.min()) if part.dtype.kind == "i" else 0
        if low >= 0 and (size is None or int(part.max()) < size):
            continue
        at = int(np.flatnonzero((part < 0) | (part >= (size if size is not None else np.inf)))[0])
        document = number + int(np.searchsorted(np.cumsum(lengths), start + at, side="right"))
        raise UserError(
            f"document {document:,} holds the id {int(part[at])}, which is not below the vocabulary's "
            f"{size if size is not None else 2**31:,}; name the tokenizer that made it",
            source.path,
        )


def _closed(ids: np.ndarray, lengths: np.ndarray, eod_id: int | None) -> Documents:
    """Each document with an end-of-document token at its end."""
    ends = np.cumsum(lengths)
    open_ = np.ones(len(lengths), bool)
    full = lengths > 0
    open_[full] = ids[ends[full] - 1] != eod_id
    if not open_.any():
        return ids, lengths
    longer = lengths + open_
    if len(lengths) == 1 and len(ids) > BLOCK_TOKENS:
        out = np.empty(len(ids) + 1, ids.dtype)
        out[:-1], out[-1] = ids, eod_id
        return out, longer
    out = np.full(len(ids) + int(open_.sum()), eod_id, np.int64)
    old = np.ones(len(out), bool)
    old[(np.cumsum(longer) - 1)[open_]] = False
    out[old] = ids
    return out, longer


def _cut(source: Foreign, eod_id: int | None) -> Iterator[Documents]:
    """A stream of tokens as documents that end with `eod_id`; without one, it is a single document."""
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
            told = "name its --eod" if eod_id is None else f"is {eod_id} its end-of-document token?"
            raise UserError(f"more than {LONGEST:,} tokens without an end of document; {told}", source.path)
    if waiting:
        rest = np.concatenate(waiting)
        yield rest, np.array([len(rest)])


def _to_weft(path: Path, output: Output, vocabulary: Vocabulary, source: Foreign, cut: bool) -> Converted:
    out, size, eod_id = output.path, vocabulary.size or 0, vocabulary.eod_id or 0
    made_from = {"operation": "convert", "format": source.format, "size": source.path.stat().st_size,
                 "vocab_size": size, "eod_id": eod_id, "recut": cut, "tokenizer": vocabulary.digest}  # fmt: skip
    old = TokenStore.open(path).info if source.format == "weft" else None
    if old is not None:
        if old.mask_sha256 is not None or old.kind != "text":
            raise UserError("already a store of Weft's, with a loss mask that converting would lose; copy it", path)
        made_from["bin_sha256"] = old.bin_sha256
    # The content of another tool's files is not known before they are read: what is there is never taken for it.
    check_out(out, STORE, overwrite=output.overwrite)
    up_to_date(out, made_from, output.overwrite, reusable=False)
    counter = TextBytes(output.tokenizer, vocabulary.digest, size) if output.tokenizer is not None else None
    with unwritable(out), hidden_folder(out) as folder:
        writer, text_bytes = IndexedWriter(folder / "tokens", token_dtype(size)), 0
        for ids, lengths in _documents(source, vocabulary, cut, output, close=True):
            writer.add(ids, lengths)
            if counter is not None:
                text_bytes += counter.count(ids, lengths)
        if writer.documents == 0:
            raise UserError("holds no document; nothing was written", source.path)
        idx = writer.finish()
        origin = SourceFile(
            path=str(path), size=source.path.stat().st_size, sha256=old.bin_sha256 if old else "",
            documents=writer.documents,
        )  # fmt: skip
        info = StoreInfo(
            tokenizer_digest=vocabulary.digest, vocab_size=size, eod_id=eod_id, dtype=str(writer.dtype),
            documents=writer.documents, tokens=writer.tokens, bytes=text_bytes if counter is not None else None,
            empty_documents=writer.empty, bin_sha256=writer.digest.hexdigest(), idx_sha256=idx, sources=[origin],
        )  # fmt: skip
        write_info(folder, info, made_from)
        publish(folder, out)
    closed = writer.tokens - source.tokens if source.tokens >= 0 else 0
    return Converted("weft", writer.documents, writer.tokens, closed)


def _linked(source: Foreign, out: Path) -> Converted:
    """The pair of files under another name; copied where the disk is another one."""
    linked = True
    with unwritable(out), hidden_folder(out.with_name(out.name + ".bin")) as folder:
        for end in (".bin", ".idx"):
            try:
                os.link(source.path.with_suffix(end), folder / f"out{end}")
            except OSError:
                shutil.copyfile(source.path.with_suffix(end), folder / f"out{end}")
                linked = False
        _publish(folder, out, (".bin", ".idx"))
    return Converted("megatron", source.documents or 0, source.tokens, linked=linked)


def _to_megatron(source: Foreign, out: Path, vocabulary: Vocabulary, documents) -> Converted:
    dtype = token_dtype(vocabulary.size if vocabulary.size is not None else source.largest + 1)
    with unwritable(out), hidden_folder(out.with_name(out.name + ".bin")) as folder:
        writer = IndexedWriter(folder / "out", dtype)
        for ids, lengths in documents:
            writer.add(ids, lengths)
        writer.finish()
        _publish(folder, out, (".bin", ".idx"))
    return Converted("megatron", writer.documents, writer.tokens)


def _to_nanogpt(source: Foreign, out: Path, vocabulary: Vocabulary, documents: Iterator[Documents]) -> Converted:
    with unwritable(out), hidden_folder(out) as folder:
        with open(folder / "out", "wb") as file:
            count, tokens = _write_ids(file, documents, 2, "nanoGPT", source)
        _publish(folder, out, ("",))
    return Converted("nanogpt", count, tokens)


def _to_pbin(source: Foreign, out: Path, vocabulary: Vocabulary, documents: Iterator[Documents]) -> Converted:
    from weft.data.stores.external.pbin import write_index

    largest = vocabulary.size - 1 if vocabulary.size is not None else source.largest
    width = 1 if largest < 256 else 2 if largest < 65536 else 4
    with unwritable(out), hidden_folder(out) as folder:
        with open(folder / "out", "w+b") as file, open(folder / "lengths", "w+b") as waiting:
            file.write((0).to_bytes(8, "little") + width.to_bytes(4, "little"))
            count, tokens = _write_ids(file, documents, width, "Modalities", source, waiting)
            waiting.seek(0)
            write_index(file, (np.frombuffer(data, "<i8") for data in iter(lambda: waiting.read(1 << 24), b"")))
            file.seek(0)
            file.write((tokens * width).to_bytes(8, "little"))
        _publish(folder, out, ("",))
    return Converted("pbin", count, tokens)


def _write_ids(
    file: BinaryIO,
    documents: Iterator[Documents],
    width: int,
    tool: str,
    source: Foreign,
    lengths_file: BinaryIO | None = None,
) -> tuple[int, int]:
    """Write ids of so many bytes end to end, and the documents' lengths in bytes into a file of their own.

    Returns:
        How many documents there are, and how many tokens.
    """
    count = tokens = 0
    for ids, lengths in documents:
        for start in range(0, len(ids), BLOCK_TOKENS):
            part = ids[start : start + BLOCK_TOKENS]
            if (largest := int(part.max())) >= 1 << 8 * width:
                raise UserError(f"id {largest} does not fit into {tool}'s {8 * width} bits", source.path)
            file.write(np.ascontiguousarray(part, f"<u{width}").data)
        if lengths_file is not None:
            lengths_file.write((lengths * width).astype("<i8").tobytes())
        count, tokens = count + len(lengths), tokens + len(ids)
    return count, tokens


def _check_file(file: Path, to: str, overwrite: bool, read: list[Path]) -> None:
    """A file can be made; one that is there is replaced only if it is what is written."""
    check_parent(file)
    check_apart(file, read)
    if not os.path.lexists(file):
        return
    try:
        found = file.is_file() and detect(file) == to
        if found and to == "pbin":
            open_foreign(file, to)
    except UserError:
        found = False
    if not found:
        raise UserError(f"exists already and is no {to} file; name another --out", file)
    if not overwrite:
        raise UserError("exists already; name another --out, or --overwrite replaces it", file)


def _publish(folder: Path, out: Path, ends: tuple[str, ...]) -> None:
    """Files called `out` get their names; the index of two comes last, so that whoever sees it sees all."""
    sync_tree(folder)
    for end in ends:
        os.replace(folder / f"out{end}", out.with_name(out.name + end))
