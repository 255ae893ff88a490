"""Verifies every byte of a store against the store's digests, and checks that its files are consistent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.stores.field_files import field_file
from weft.data.stores.indexed import BLOCK_DOCUMENTS, BLOCK_TOKENS, document_blocks, map_file, release_pages
from weft.data.stores.store import TokenStore
from weft.data.stores.store_json import FILE_DIGESTS, content_digest, file_digest, to_bytes
from weft.errors import UserError
from weft.files import read_json
from weft.headers import HEADER
from weft.observe.console import Console

REPORTED = 3  # maximum number of problems of one kind that are reported individually


class Problems(list[str]):
    """A list of a store's problems, one line each (`file: problem`); empty if the store has no problem.

    Attributes:
        unchecked: what could not be checked because the store is old and lacks digests, one line each.
    """

    def __init__(self, lines: Iterable[str] = (), unchecked: Iterable[str] = ()):
        super().__init__(lines)
        self.unchecked = list(unchecked)

    @property
    def verdict(self) -> str:
        """A short description of the verification's result."""
        if self:
            return "damaged"
        return "every byte " + ("of the tokens " if self.unchecked else "") + "is as it was written"


def verify(path: str | Path, console: Console | None = None) -> Problems:
    """Reads every byte of a store and returns its problems.

    Checks the digests of all files, the offsets and boundaries of the index, and the counts in `store.json`. Also
    checks that all ids are in the vocabulary, that every document ends with the end-of-document token, and that the
    mask consists of 0 and 1.

    Raises:
        UserError: the path does not exist.
    """
    if not Path(path).exists():
        raise UserError("no such token store; check the path, or create a store with `weft data pack`", path)
    try:
        store = TokenStore(path)
    except UserError as error:  # wrong headers or sizes: nothing else can be read
        return Problems([str(error)])
    return _Verification(store, console or Console(prints=False)).run()


class _Verification:
    def __init__(self, store: TokenStore, console: Console):
        self.store, self.console = store, console
        self.places: dict[tuple[str, str], list[str]] = {}  # (file, kind of problem) -> location and problem
        self.problems = Problems()

    def run(self) -> Problems:
        store, info = self.store, self.store.info
        with (
            ThreadPoolExecutor(2) as pool,
            self.console.progress(store.num_tokens, f"verifying {store.path}", unit="token") as bar,
        ):
            self._check_index()
            digest, mask_digest, empty = hashlib.sha256(), hashlib.sha256(), 0
            for first, stop, start, end in document_blocks(store.lengths):
                tokens, lengths = store.tokens[start:end], np.array(store.lengths[first:stop], np.int64)
                hashing = [pool.submit(digest.update, np.ascontiguousarray(tokens).data)] if len(tokens) else []
                if store.loss_mask is not None and len(tokens):
                    mask = store.loss_mask[start:end]
                    hashing.append(pool.submit(mask_digest.update, np.ascontiguousarray(mask).data))
                    if (bad := np.flatnonzero(mask > 1)).size:
                        self._add_tokens("loss_mask.bin", "is neither 0 nor 1", first, lengths, bad)
                self._check_tokens(first, lengths, tokens)
                empty += int(np.count_nonzero(lengths == 1))
                for future in hashing:
                    future.result()
                release_pages(store.tokens, store.loss_mask, store.lengths)
                bar.update(end)
        # The files have no other bytes: opening the store checked their sizes.
        self._compare("tokens.bin", digest.hexdigest(), info.bin_sha256)
        if info.mask_sha256 is not None:
            self._compare("loss_mask.bin", mask_digest.hexdigest(), info.mask_sha256)
        for name, expected in info.fields.items():
            self._compare(field_file(name), file_digest(store.path / field_file(name)) or "", expected)
            if (bad := np.flatnonzero(~np.isfinite(store.fields[name]))).size:
                self._report(field_file(name), f"document {bad[0]:,} has no finite number")
        if info.kind == "text" and empty != info.empty_documents:
            self._report(
                "store.json",
                f"empty_documents is {info.empty_documents:,}, but the store has {empty:,} empty documents",
            )
        stored = read_json(store.path / "store.json")
        self._check_other_files(stored)
        self._check_store_json(stored)
        self._check_sources(stored)
        if store.num_documents % info.item_documents:
            self._report("tokens.idx", f"the {store.num_documents:,} documents are not complete preference pairs")
        for (file, kind), places in self.places.items():
            for place in places[:REPORTED]:
                self._report(file, place)
            if len(places) > REPORTED:
                self._report(file, f"{kind}: {len(places) - REPORTED:,} more places")
        return self.problems

    def _check_other_files(self, stored: dict[str, Any]) -> None:
        """Compares `rejects.jsonl` and `duplicates.jsonl` with their digests in `store.json`."""
        if "rejects_sha256" not in stored:
            return
        for key, name in FILE_DIGESTS.items():
            expected, actual = stored.get(key), file_digest(self.store.path / name)
            if expected is None and actual is not None:
                self._report(name, "exists, but store.json has no digest of it: it was not part of the store")
            elif expected is not None and actual is None:
                self._report(name, "is missing, but store.json has its digest")
            elif expected is not None and actual is not None:
                self._compare(name, actual, str(expected))

    def _check_store_json(self, stored: dict[str, Any]) -> None:
        file = self.store.path / "store.json"
        if "digest" in stored:
            if stored["digest"] != content_digest(stored):
                self._report("store.json", "its content was changed: its digest differs")
            elif file.read_bytes() != to_bytes(stored):
                self._report(
                    "store.json", "its bytes were changed (for example its formatting), but its values are the same"
                )
        elif "rejects_sha256" in stored:
            self._report("store.json", "its digest is missing")
        else:
            self.problems.unchecked.append(f"{file}: has no digest of its content, so its numbers were not checked")

    def _check_sources(self, stored: dict[str, Any]) -> None:
        """Compares the totals in `store.json` with the sums over the sources and with the lines of `rejects.jsonl`."""
        info, rejects = self.store.info, self.store.path / "rejects.jsonl"
        source_rejects = sum(source.rejected for source in info.sources)
        made_from = stored.get("made_from")
        if isinstance(made_from, dict) and "encoder" in made_from:  # packed, not derived from another store
            rejected = sum(info.rejected.values())
            if rejected != source_rejects:
                self._report(
                    "store.json", f"rejected is {rejected:,}, but the sum over its sources is {source_rejects:,}"
                )
            documents = sum(source.documents for source in info.sources) * info.item_documents
            if documents != info.documents:
                self._report(
                    "store.json", f"documents is {info.documents:,}, but the sum over its sources is {documents:,}"
                )
        lines = 0
        if rejects.exists():
            with open(rejects, "rb") as file:
                lines = sum(1 for _ in file)
        if lines != source_rejects:
            self._report(
                "rejects.jsonl", f"has {lines:,} lines, but store.json counts {source_rejects:,} rejected documents"
            )

    def _check_index(self) -> None:
        """Checks the lengths, offsets and boundaries in the index, and the digest of the index."""
        store, count = self.store, self.store.num_documents
        path, size = store.path / "tokens.idx", store.tokens.dtype.itemsize
        boundaries = map_file(path, np.int64, HEADER.size + 12 * count, count + 1)
        offset = 0
        for start in range(0, count, BLOCK_DOCUMENTS):
            block = slice(start, min(start + BLOCK_DOCUMENTS, count))
            lengths = np.array(store.lengths[block], np.int64)
            ends = offset + np.cumsum(lengths) * size
            begins = ends - lengths * size
            self._add_documents("has no end-of-document token", start, lengths < 1)
            self._add_documents(
                "its offset is not the end of the previous document", start, store.offsets[block] != begins
            )
            numbers = np.arange(start, block.stop)
            self._add_documents("its boundary in the index is wrong", start, boundaries[block] != numbers)
            offset = int(ends[-1])
        self._add_documents("its boundary in the index is wrong", count, boundaries[count:] != count)
        with open(path, "rb") as file:
            self._compare("tokens.idx", hashlib.file_digest(file, "sha256").hexdigest(), store.info.idx_sha256)
        release_pages(store.lengths, store.offsets, boundaries)

    def _check_tokens(self, first: int, lengths: np.ndarray, tokens: np.ndarray) -> None:
        info = self.store.info
        for start in range(0, len(tokens), BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS]
            wrong = block >= info.vocab_size
            if block.dtype.kind == "i":
                wrong |= block < 0
            if wrong.any():
                kind = f"outside the vocabulary of {info.vocab_size:,}"
                self._add_tokens("tokens.bin", kind, first, lengths, start + np.flatnonzero(wrong), tokens)
        ends = np.cumsum(lengths)
        complete = (lengths > 0) & (ends > 0) & (ends <= len(tokens))  # lengths of a damaged index can be negative
        is_open = np.flatnonzero(complete)[tokens[ends[complete] - 1] != info.eod_id]
        if len(is_open):
            kind = f"does not end with the end-of-document token {info.eod_id}"
            self.places.setdefault(("tokens.bin", kind), []).extend(f"document {first + n:,} {kind}" for n in is_open)

    def _add_tokens(self, file, kind, first, lengths, positions, values=None) -> None:
        """Adds a problem that several tokens of a block have.

        Args:
            file: name of the file with the problem.
            kind: the problem, as the end of a message.
            first: index of the block's first document in the store.
            lengths: number of tokens of each document of the block.
            positions: positions of the tokens in the block.
            values: the block's ids, to be named in the message.
        """
        ends = np.cumsum(lengths)
        places = self.places.setdefault((file, kind), [])
        for position in positions[:REPORTED].tolist():
            number = min(int(np.searchsorted(ends, position, side="right")), len(ends) - 1)
            at = position - int(ends[number] - lengths[number])
            value = "" if values is None else f" is {int(values[position])},"
            places.append(f"document {first + number:,}, token {at:,}{value} {kind}")
        places += [""] * (len(positions) - REPORTED)

    def _add_documents(self, kind: str, first: int, wrong: np.ndarray) -> None:
        if (numbers := np.flatnonzero(wrong)).size:
            places = self.places.setdefault(("tokens.idx", kind), [])
            places += [f"document {first + number:,}: {kind}" for number in numbers.tolist()]

    def _compare(self, file: str, actual: str, expected: str) -> None:
        if actual != expected:
            self._report(
                file, f"its bytes were changed: its sha256 is {actual[:16]}, not {expected[:16]} as in store.json"
            )

    def _report(self, file: str, problem: str) -> None:
        self.problems.append(f"{self.store.path / file}: {problem}")
