"""Every byte of a store looked at: is it what was written, and is it consistent in itself?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from weft.data.stores.indexed import BLOCK_DOCUMENTS, map_file, release, spans
from weft.data.stores.store import TokenStore
from weft.data.stores.store_json import BESIDE, as_bytes, file_digest, own_digest
from weft.errors import UserError
from weft.files import read_json
from weft.headers import HEADER
from weft.observe.console import Console

TOLD = 3  # problems of one kind that are told one by one


class Found(list[str]):
    """What is wrong with a store, one line each (`file: what`); empty if nothing is.

    Attributes:
        unchecked: what could not be looked at, one line each: older stores have fewer digests.
    """

    def __init__(self, lines: Iterable[str] = (), unchecked: Iterable[str] = ()):
        super().__init__(lines)
        self.unchecked = list(unchecked)

    @property
    def verdict(self) -> str:
        """All in a few words."""
        if self:
            return "damaged"
        return "every byte " + ("of the tokens " if self.unchecked else "") + "is as it was written"


def verify(path: str | Path, console: Console | None = None) -> Found:
    """Look at every byte of a store.

    All files' digests; the index's offsets and boundaries; each id below the vocabulary's size; an end-of-document
    token at the end of each document; a mask of zeros and ones; the totals of `store.json`, and its own bytes.

    Raises:
        UserError: no store at all.
    """
    if not Path(path).exists():
        raise UserError("no such token store; `weft data pack` makes one", path)
    try:
        store = TokenStore.open(path)
    except UserError as error:  # its headers or sizes: nothing further can be read
        return Found([str(error)])
    return _Check(store, console or Console(speaks=False)).run()


class _Check:
    def __init__(self, store: TokenStore, console: Console):
        self.store, self.console = store, console
        self.found: dict[tuple[str, str], list[str]] = {}  # (file, kind of problem) -> where
        self.wrong = Found()

    def run(self) -> Found:
        store, info = self.store, self.store.info
        with (
            ThreadPoolExecutor(2) as pool,
            self.console.progress(store.num_tokens, f"verifying {store.path}", unit="token") as bar,
        ):
            self._index()
            digest, mask_digest, empty = hashlib.sha256(), hashlib.sha256(), 0
            for first, stop, start, end in spans(store.lengths):
                tokens, lengths = store.tokens[start:end], np.array(store.lengths[first:stop], np.int64)
                hashing = [pool.submit(digest.update, np.ascontiguousarray(tokens).data)] if len(tokens) else []
                if store.loss_mask is not None and len(tokens):
                    mask = store.loss_mask[start:end]
                    hashing.append(pool.submit(mask_digest.update, np.ascontiguousarray(mask).data))
                    if (bad := np.flatnonzero(mask > 1)).size:
                        self._note("loss_mask.bin", "neither 0 nor 1", first, lengths, bad)
                self._tokens(first, lengths, tokens)
                empty += int(np.count_nonzero(lengths == 1))
                for done in hashing:
                    done.result()
                release(store.tokens, store.loss_mask, store.lengths)
                bar.update(end)
        # Nothing but the bytes that the index speaks of is in the files: their sizes were checked when it was opened.
        self._compare("tokens.bin", digest.hexdigest(), info.bin_sha256)
        if info.mask_sha256 is not None:
            self._compare("loss_mask.bin", mask_digest.hexdigest(), info.mask_sha256)
        for what, counted, stated in (
            ("documents", store.num_documents, info.documents),
            ("tokens", store.num_tokens, info.tokens),
            ("empty_documents", empty, info.empty_documents if info.kind == "text" else empty),
        ):
            if counted != stated:
                self._say("store.json", f"{what} is {stated:,} where there are {counted:,}")
        self._stored()
        if store.num_documents % info.item_documents:
            self._say("tokens.idx", f"{store.num_documents:,} documents of preferences are no pairs")
        for (file, kind), places in self.found.items():
            for place in places[:TOLD]:
                self._say(file, place)
            if len(places) > TOLD:
                self._say(file, f"{kind}: {len(places) - TOLD:,} more places like these")
        return self.wrong

    def _stored(self) -> None:
        """`store.json` itself, and the files of rejects and duplicates."""
        folder, info = self.store.path, self.store.info
        stored = read_json(folder / "store.json")
        for key, name in BESIDE.items():
            told, there = stored.get(key), file_digest(folder / name)
            if "rejects_sha256" not in stored:
                continue
            if told is None and there is not None:
                self._say(name, "is there, where none was written")
            elif there is None and told is not None:
                self._say(name, "is missing; store.json has its digest")
            elif told is not None and there is not None:
                self._compare(name, there, str(told))
        if "digest" in stored:
            if stored["digest"] != own_digest(stored):
                self._say("store.json", "what it says is not what was written: its digest is another's")
            elif (folder / "store.json").read_bytes() != as_bytes(stored):
                self._say("store.json", "its bytes are not those that were written, though it says the same")
        elif "rejects_sha256" in stored:
            self._say("store.json", "its digest is gone")
        else:
            self.wrong.unchecked.append(
                f"{folder / 'store.json'}: has no digest of its own: its numbers were not checked"
            )
        made = stored.get("made_from")
        packed = isinstance(made, dict) and "encoder" in made
        rejected, told = sum(source.rejected for source in info.sources), sum(info.rejected.values())
        if packed and rejected != told:
            self._say("store.json", f"rejected is {told:,} where its sources have {rejected:,}")
        read = sum(source.documents for source in info.sources) * info.item_documents
        if packed and read != info.documents:
            self._say("store.json", f"documents is {info.documents:,} where its sources have {read:,}")
        number = 0
        if (folder / "rejects.jsonl").exists():
            with open(folder / "rejects.jsonl", "rb") as lines:
                number = sum(1 for _ in lines)
        if number != rejected:
            self._say("rejects.jsonl", f"{number:,} lines where the sources of store.json have {rejected:,} rejects")

    def _index(self) -> None:
        """Lengths, offsets and boundaries, and the file's digest."""
        store, count = self.store, self.store.num_documents
        path, size = store.path / "tokens.idx", store.tokens.dtype.itemsize
        boundaries = map_file(path, np.int64, HEADER.size + 12 * count, count + 1)
        offset = 0
        for start in range(0, count, BLOCK_DOCUMENTS):
            part = slice(start, min(start + BLOCK_DOCUMENTS, count))
            lengths = np.array(store.lengths[part], np.int64)
            ends = offset + np.cumsum(lengths) * size
            self._numbers("a document without its end-of-document token", start, lengths < 1)
            self._numbers(
                "an offset that is not the end of what was before", start, store.offsets[part] != ends - lengths * size
            )
            self._numbers(
                "a boundary that is not its document's number", start, boundaries[part] != np.arange(start, part.stop)
            )
            offset = int(ends[-1])
        self._numbers("a boundary that is not its document's number", count, boundaries[count:] != count)
        with open(path, "rb") as file:
            self._compare("tokens.idx", hashlib.file_digest(file, "sha256").hexdigest(), store.info.idx_sha256)
        release(store.lengths, store.offsets, boundaries)

    def _tokens(self, first: int, lengths: np.ndarray, tokens: np.ndarray) -> None:
        info = self.store.info
        for start in range(0, len(tokens), 1 << 22):
            part = tokens[start : start + (1 << 22)]
            wrong = part >= info.vocab_size
            if part.dtype.kind == "i":
                wrong |= part < 0
            if wrong.any():
                self._note("tokens.bin", f"outside of the vocabulary's {info.vocab_size:,}", first, lengths,
                           start + np.flatnonzero(wrong), tokens)  # fmt: skip
        ends = np.cumsum(lengths)
        there = (lengths > 0) & (ends <= len(tokens))
        open_ = np.flatnonzero(there)[tokens[ends[there] - 1] != info.eod_id]
        places = self.found.setdefault(("tokens.bin", "not ended"), []) if len(open_) else []
        places += [f"document {first + n:,} does not end with the end-of-document token {info.eod_id}" for n in open_]

    def _note(self, file, kind, first, lengths, positions, values=None) -> None:
        """Positions in a block as documents and tokens."""
        ends = np.cumsum(lengths)
        places = self.found.setdefault((file, kind), [])
        for position in positions[:TOLD].tolist():
            number = int(np.searchsorted(ends, position, side="right"))
            at = position - int(ends[number] - lengths[number])
            value = "" if values is None else f" is {int(values[position])},"
            places.append(f"document {first + number:,}, token {at:,}{value} {kind}")
        places += [""] * (len(positions) - TOLD)

    def _numbers(self, kind: str, first: int, wrong: np.ndarray) -> None:
        if (numbers := np.flatnonzero(wrong)).size:
            places = self.found.setdefault(("tokens.idx", kind), [])
            places += [f"document {first + number:,}: {kind}" for number in numbers.tolist()]

    def _compare(self, file: str, found: str, stated: str) -> None:
        if found != stated:
            self._say(file, f"its bytes are not those that were packed: sha256 {found[:16]} for {stated[:16]}")

    def _say(self, file: str, what: str) -> None:
        self.wrong.append(f"{self.store.path / file}: {what}")
