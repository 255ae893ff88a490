"""What a worker of `pack` does: read a part's documents, encode them in batches, write its files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.documents import Counts, Document, Reject
from weft.data.packing.encoder import Encoded, Encoder
from weft.data.packing.part_files import Job, Part, Stop, Unwritable, part_file
from weft.data.sources import read
from weft.data.stores.indexed import token_dtype
from weft.errors import UserError
from weft.files import replace_file

BATCH = 2_000_000  # characters (of records: raw bytes) that one thread encodes at once; several share four times that
FAILS = "the tokenizer fails on it"


def encode_part(
    job: Job,
    part: Part,
    encoder: Encoder,
    *,
    on_progress: Callable[[int, int], None] = lambda raw_bytes, tokens: None,
    on_document: Callable[[int, int | None, int], None] | None = None,
) -> None:
    """Encode a part's documents and write its files.

    Args:
        on_progress: is told how many raw bytes and tokens are new, a few times a second.
        on_document: is told each document's unit, its line there, and the lines of that file in earlier units of the
            part, before the document is encoded, alone: to find out where a worker dies.

    Raises:
        Stop: at the first reject, where the job fails at one.
        Unwritable: a full disk, and the like.
        UserError: an input cannot be opened; out of memory; an id outside the vocabulary.
    """
    with _Worker(job, part, encoder, on_progress, on_document) as worker:
        for number, unit in enumerate(part.units):
            try:
                worker.read(number)
            except MemoryError:
                raise UserError("out of memory; fewer --workers need less", unit.path) from None
        worker.finish()


class _Worker:
    """Encodes one part. `_batch` waits to be encoded; `_owners` are its documents' units; `_rejects` wait for it, so
    that all are noted in the order of the input."""

    def __init__(
        self,
        job: Job,
        part: Part,
        encoder: Encoder,
        on_progress: Callable[[int, int], None],
        on_document: Callable[[int, int | None, int], None] | None,
    ):
        self._job, self._part, self._encoder = job, part, encoder
        self._on_progress, self._on_document = on_progress, on_document
        self._counts = [Counts() for _ in part.units]
        self._batch: list[Document] = []
        self._owners: list[int] = []
        self._rejects: list[tuple[int, Reject]] = []
        self._waiting, self._limit = 0, BATCH if job.threads == 1 else 4 * BATCH
        self._tokens = self._documents = self._noted = 0
        self._notes: Counter[str] = Counter()
        self._record_texts = [0 for _ in part.units]  # bytes of the text that records became
        self._fresh_bytes = self._told_tokens = 0
        self._told_at = time.monotonic()
        self._tokenizer = tokenizer = encoder.open()
        # Whether the fast library is to be trusted is found out on the first part alone, whoever does that: what is
        # packed must not depend on which worker saw which documents first.
        tokenizer.checked = part.index > 0
        self._vocab_size, self._dtype = tokenizer.vocab_size, token_dtype(tokenizer.vocab_size)
        self._files: dict[str, Any] = {}

    def __enter__(self) -> _Worker:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path("json"))  # of an older part: from here on this one is not whole
        try:
            for what in ("tokens", "lengths", "mask") if self._encoder.has_mask else ("tokens", "lengths"):
                self._files[what] = open(self._path(what), "wb", buffering=0)
        except OSError as error:
            raise Unwritable(error.strerror) from None
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def _path(self, what: str) -> str:
        return part_file(self._job.folder, self._part.index, what)

    def read(self, number: int) -> None:
        """One unit's documents, into batches; full ones are encoded."""
        records, batch, owners, rejects = self._job.reading.records, self._batch, self._owners, self._rejects
        for item in read(self._part.units[number], self._job.reading, self._counts[number], self._on_bytes):
            if isinstance(item, Reject):
                rejects.append((number, item))
                if (self._job.fail and not item.on_purpose) or len(rejects) >= 4096:
                    self._flush()
                continue
            batch.append(item)
            owners.append(number)
            if not records:
                self._waiting += len(item.value)
            if self._on_document is not None:
                self._on_document(number, item.line, self._lines_before(number))
                self._flush()
            elif self._waiting >= self._limit:
                self._flush()
        if records:
            self._flush()  # an encoder names what it refuses by its line, which is of the unit
            self._counts[number].bytes = self._record_texts[number]

    def finish(self) -> None:
        """Encode what waits; the part is whole after this."""
        self._flush()
        for file in self._files.values():
            file.close()
        content = {
            "key": self._part.key,
            "tokens": self._tokens,
            "documents": self._documents,
            "rejects": self._noted,
            "notes": dict(self._notes),
            "exact": self._tokenizer.exact,
            "reason": self._tokenizer.reason,
            "units": [{k: v for k, v in vars(counts).items() if v} for counts in self._counts],
        }
        try:
            replace_file(Path(self._path("json")), json.dumps(content), durable=False)
        except OSError as error:
            raise Unwritable(error.strerror) from None
        self._on_progress(self._fresh_bytes, self._tokens - self._told_tokens)

    def _on_bytes(self, number: int) -> None:
        self._fresh_bytes += number
        if self._job.reading.records:
            self._waiting += number
        now = time.monotonic()
        if now - self._told_at >= 0.1:
            self._on_progress(self._fresh_bytes, self._tokens - self._told_tokens)
            self._fresh_bytes, self._told_tokens, self._told_at = 0, self._tokens, now

    def _flush(self) -> None:
        if self._batch:
            encoded = self._encode()
            for position, reject in encoded.rejects:
                counts, value = self._counts[self._owners[position]], self._batch[position].value
                counts.documents -= 1
                counts.rejected[reject.reason] += 1
                if isinstance(value, str):
                    counts.bytes -= len(value.encode())
                    counts.empty -= not value
                self._rejects.append((self._owners[position], reject))
            self._notes.update(encoded.notes)
            self._record_texts[self._owners[0]] += encoded.bytes or 0  # records of one unit only are in a batch
            self._write(encoded.ids, encoded.lengths, encoded.mask)
            self._batch.clear()
            self._owners.clear()
            self._waiting = 0
        if self._rejects:
            self._rejects.sort(key=_in_order)
            hard = [entry for entry in self._rejects if not entry[1].on_purpose]
            if self._job.fail and hard:
                self._stop(*hard[0])
            self._note()

    def _encode(self) -> _Placed:
        try:
            return _placed(self._encoder.encode(self._batch), self._batch)
        except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # tokenizer libraries raise bare Exceptions, and panics that are not even those
            return self._one_by_one()

    def _one_by_one(self) -> _Placed:
        """The batch again, to find the documents that the encoder fails on."""
        parts: list[Encoded] = []
        rejects: list[tuple[int, Reject]] = []
        for position, document in enumerate(self._batch):
            try:
                encoded = self._encoder.encode([document])
                parts.append(encoded)
                rejects += [(position, reject) for reject in encoded.rejects]
            except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # as above; it is counted under its reason, or ends the pack
                said = " ".join(str(error).split())[:200] or type(error).__name__
                rejects.append((position, Reject(document.line, FAILS, said)))
        ids = np.concatenate([p.ids for p in parts]) if parts else np.zeros(0, np.uint32)
        lengths = np.concatenate([p.lengths for p in parts]) if parts else np.zeros(0, np.int64)
        masks = [p.mask for p in parts if p.mask is not None]
        mask = np.concatenate(masks) if masks else np.zeros(0, np.uint8) if self._encoder.has_mask else None
        notes = sum((p.notes for p in parts), Counter())
        return _Placed(ids, lengths, mask, rejects, notes, sum(p.bytes or 0 for p in parts))

    def _write(self, ids: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None) -> None:
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise UserError(
                f"the tokenizer gave id {int(ids.max()):,}, outside its vocabulary of {self._vocab_size:,}; "
                "it is inconsistent"
            )
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise UserError(f"a document of {int(lengths.max()):,} tokens is longer than a store can hold; cut it")
        streams = {"tokens": (ids, self._dtype), "lengths": (lengths, np.int32), "mask": (mask, np.uint8)}
        try:
            for what, file in self._files.items():
                array, dtype = streams[what]
                data = np.ascontiguousarray(array, dtype=dtype).data.cast("B")
                while len(data):
                    data = data[file.write(data) :]
        except OSError as error:
            raise Unwritable(error.strerror) from None
        self._tokens += len(ids)
        self._documents += len(lengths)

    def _note(self) -> None:
        rows = (
            json.dumps([number, reject.line, reject.reason, reject.last]) + "\n" for number, reject in self._rejects
        )
        try:
            with open(self._path("rejects"), "a" if self._noted else "w", encoding="utf-8") as file:
                file.writelines(rows)
        except OSError as error:
            raise Unwritable(error.strerror) from None
        self._noted += len(self._rejects)
        self._rejects.clear()

    def _stop(self, number: int, reject: Reject) -> None:
        reason = f"{reject.reason} ({reject.hint})" if reject.hint else reject.reason
        what = f"{reason}; mend it, or --on-error skip leaves such documents out"
        raise Stop(number, reject.line, self._lines_before(number), what)

    def _lines_before(self, number: int) -> int:
        units, path = self._part.units, self._part.units[number].path
        return sum(c.lines for u, c in zip(units[:number], self._counts, strict=False) if u.path == path)


def _in_order(entry: tuple[int, Reject]) -> tuple[int, float]:
    unit, reject = entry
    return unit, float("inf") if reject.line is None else reject.line  # no line: what broke off a file's rest


@dataclass
class _Placed:
    """A batch's ids, and its rejects by their place in the batch."""

    ids: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None
    rejects: list[tuple[int, Reject]]
    notes: Counter[str]
    bytes: int | None


def _placed(encoded: Encoded, batch: Sequence[Document]) -> _Placed:
    places = {document.line: place for place, document in enumerate(batch)} if encoded.rejects else {}
    rejects = [(places[reject.line], reject) for reject in encoded.rejects]
    return _Placed(encoded.ids, encoded.lengths, encoded.mask, rejects, encoded.notes, encoded.bytes)
