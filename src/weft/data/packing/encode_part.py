"""Encodes a part in a worker: reads the documents, encodes them in batches, and writes the part's files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.documents import Counts, Document, Reject
from weft.data.packing.encoder import Encoded, Encoder
from weft.data.packing.part_files import DocumentFailure, Job, Part, WriteFailure, files_of, part_path
from weft.data.sources import read
from weft.data.sources.source_format import reject_message
from weft.data.sources.values import utf8_size
from weft.data.stores.field_files import field_file
from weft.data.stores.indexed import token_dtype
from weft.errors import UserError
from weft.files import replace_file

BATCH = 2_000_000  # characters (for records: raw bytes) per batch; 4 times as many if there are several threads
FAILS = "the tokenizer fails on the text"
# Exceptions of an encoder that do not concern a single document.
FATAL = (UserError, MemoryError, KeyboardInterrupt, SystemExit)


def encode_part(
    job: Job,
    part: Part,
    encoder: Encoder,
    *,
    on_progress: Callable[[int, int], None] = lambda raw_bytes, tokens: None,
    on_document: Callable[[int, int | None, int], None] | None = None,
) -> None:
    """Encodes the documents of a part (a group of files and ranges of files), and writes the part's files.

    Args:
        on_progress: called several times a second with the numbers of raw bytes and tokens since the last call.
        on_document: called before each document is encoded, so that a crash can be located. The arguments are the
            `unit`, `line` and `before` of `DocumentFailure`. If given, documents are encoded one at a time.

    Raises:
        DocumentFailure: `job.fail` is set, and a document was rejected for a reason that is not in `encoder.drops`.
        WriteFailure: the part cannot be written, for example because the disk is full.
        UserError: an input changed, memory is exhausted, or an id is outside the vocabulary.
    """
    with _PartEncoder(job, part, encoder, on_progress, on_document) as worker:
        for number, unit in enumerate(part.units):
            try:
                worker.read(number)
            except MemoryError:
                raise UserError("out of memory; use fewer --workers", unit.path) from None
        worker.finish()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteFailure(error.strerror) from None


@dataclass
class _PartEncoder:
    """Reads, encodes and writes the documents of one part (a group of files and ranges of files).

    `_batch` contains the documents to encode next, and `_owners` the index of each document's unit. The rejected
    documents in `_rejects` are written together with the batch, so that they stay in the order of the input.
    """

    job: Job
    part: Part
    encoder: Encoder
    on_progress: Callable[[int, int], None]
    on_document: Callable[[int, int | None, int], None] | None

    def __post_init__(self):
        self._counts = [Counts() for _ in self.part.units]
        self._batch: list[Document] = []
        self._owners: list[int] = []
        self._rejects: list[tuple[int, Reject]] = []
        self._batch_size, self._limit = 0, BATCH if self.job.threads == 1 else 4 * BATCH
        self._tokens = self._documents = self._written_rejects = 0
        self._notes: Counter[str] = Counter()
        self._record_bytes = 0  # bytes of the text to which the records of a unit were converted
        self._new_bytes = self._reported_tokens = 0
        self._reported_at = time.monotonic()
        self._tokenizer = tokenizer = self.encoder.open()
        # Only the first part decides whether the fast library is trusted, so that the result does not depend on which
        # worker encodes which documents first.
        tokenizer.checked = self.part.index > 0
        self._vocab_size, self._dtype = tokenizer.vocab_size, token_dtype(tokenizer.vocab_size)
        self._files: dict[str, Any] = {}

    def __enter__(self) -> _PartEncoder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path("json"))  # written by an earlier attempt; without this file, the part is not finished
        with _writing():
            for what in files_of(self.encoder):
                self._files[what] = open(self._path(what), "wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def _path(self, what: str) -> str:
        return part_path(self.job.folder, self.part.index, what)

    def read(self, number: int) -> None:
        """Reads the documents of the unit with index `number` into batches, and encodes each full batch."""
        records, batch, owners, rejects = self.job.reading.records, self._batch, self._owners, self._rejects
        self._record_bytes = 0
        for item in read(self.part.units[number], self.job.reading, self._counts[number], self._on_bytes):
            if isinstance(item, Reject):
                rejects.append((number, item))
                if self.job.fail or len(rejects) >= 4096:
                    self._flush()
                continue
            batch.append(item)
            owners.append(number)
            if not records:
                self._batch_size += len(item.value)
            if self.on_document is not None:
                self.on_document(number, item.line, self._lines_before(number))
                self._flush()
            elif self._batch_size >= self._limit:
                self._flush()
        if records:
            self._flush()  # an encoder identifies rejected documents by their line in the unit
            self._counts[number].bytes = self._record_bytes

    def finish(self) -> None:
        """Encodes the last batch and marks the part as finished."""
        self._flush()
        for file in self._files.values():
            file.close()
        content = {
            "key": self.part.key,
            "tokens": self._tokens,
            "documents": self._documents,
            "rejects": self._written_rejects,
            "notes": dict(self._notes),
            "exact": self._tokenizer.exact,
            "reason": self._tokenizer.reason,
            "units": [{k: v for k, v in vars(counts).items() if v} for counts in self._counts],
        }
        with _writing():
            replace_file(Path(self._path("json")), json.dumps(content), durable=False)
        self._report_progress()

    def _on_bytes(self, number: int) -> None:
        self._new_bytes += number
        if self.job.reading.records:
            self._batch_size += number
        if time.monotonic() - self._reported_at >= 0.1:
            self._report_progress()

    def _report_progress(self) -> None:
        self.on_progress(self._new_bytes, self._tokens - self._reported_tokens)
        self._new_bytes, self._reported_tokens, self._reported_at = 0, self._tokens, time.monotonic()

    def _flush(self) -> None:
        if self._batch:
            encoded, positions = self._encode()
            for position, reject in zip(positions, encoded.rejects, strict=True):
                counts, value = self._counts[self._owners[position]], self._batch[position].value
                counts.documents -= 1
                counts.rejected[reject.reason] += 1
                if isinstance(value, str):
                    counts.bytes -= utf8_size(value)
                    counts.empty -= not value
                self._rejects.append((self._owners[position], reject))
            self._notes.update(encoded.notes)
            self._record_bytes += encoded.bytes or 0
            self._write(encoded)
            self._batch.clear()
            self._owners.clear()
            self._batch_size = 0
        if self._rejects:
            self._rejects.sort(key=_input_order)
            for unit, reject in self._rejects:
                if self.job.fail and reject.reason not in self.encoder.drops:
                    raise DocumentFailure(
                        unit, reject.line, self._lines_before(unit), reject_message(reject, self.encoder.words)
                    )
            self._write_rejects()

    def _encode(self) -> tuple[Encoded, list[int]]:
        """Encodes the batch. Returns the result, and the positions in the batch of the rejected documents."""
        try:
            encoded = self.encoder.encode(self._batch)
        except FATAL:
            raise
        except BaseException:  # tokenizer libraries raise bare Exceptions, and panics that are not Exceptions
            return self._encode_singly()
        by_line = {document.line: i for i, document in enumerate(self._batch)} if encoded.rejects else {}
        return encoded, [by_line[reject.line] for reject in encoded.rejects]

    def _encode_singly(self) -> tuple[Encoded, list[int]]:
        """Does the same as `_encode`, one document at a time, and rejects documents on which the encoder fails."""
        done: list[Encoded] = []
        rejects: list[Reject] = []
        positions: list[int] = []
        for position, document in enumerate(self._batch):
            try:
                encoded = self.encoder.encode([document])
                done.append(encoded)
                new = encoded.rejects
            except FATAL:
                raise
            except BaseException as error:  # see `_encode`
                new = [Reject(document.line, FAILS, " ".join(str(error).split())[:200] or type(error).__name__)]
            rejects += new
            positions += [position] * len(new)
        masks = [encoded.mask for encoded in done if encoded.mask is not None]
        result = Encoded(
            ids=np.concatenate([np.zeros(0, np.uint32), *(encoded.ids for encoded in done)]),
            lengths=np.concatenate([np.zeros(0, np.int64), *(encoded.lengths for encoded in done)]),
            mask=np.concatenate([np.zeros(0, np.uint8), *masks]) if self.encoder.has_mask else None,
            fields={
                name: np.concatenate([np.zeros(0), *(e.fields[name] for e in done)]) for name in self.encoder.fields
            },
            rejects=rejects,
            notes=sum((encoded.notes for encoded in done), Counter()),
            bytes=sum(encoded.bytes or 0 for encoded in done),
        )
        return result, positions

    def _write(self, encoded: Encoded) -> None:
        ids, lengths = encoded.ids, encoded.lengths
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise UserError(
                f"the tokenizer returned id {int(ids.max()):,}, outside its vocabulary of {self._vocab_size:,}; "
                "the tokenizer is inconsistent: create it again"
            )
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise UserError(f"a document of {int(lengths.max()):,} tokens is too long for a store; split the document")
        arrays = {"tokens": (ids, self._dtype), "lengths": (lengths, np.int32), "mask": (encoded.mask, np.uint8)}
        arrays |= {field_file(name): (values, np.float32) for name, values in encoded.fields.items()}
        with _writing():
            for what, file in self._files.items():
                array, dtype = arrays[what]
                data = np.ascontiguousarray(array, dtype=dtype).data.cast("B")
                while len(data):
                    data = data[file.write(data) :]
        self._tokens += len(ids)
        self._documents += len(lengths)

    def _write_rejects(self) -> None:
        rows = (
            json.dumps([number, reject.line, reject.reason, reject.last]) + "\n" for number, reject in self._rejects
        )
        with _writing(), open(self._path("rejects"), "a" if self._written_rejects else "w", encoding="utf-8") as file:
            file.writelines(rows)
        self._written_rejects += len(self._rejects)
        self._rejects.clear()

    def _lines_before(self, number: int) -> int:
        """Returns the number of lines in earlier units of the part that belong to the same file as unit `number`."""
        units, path = self.part.units, self.part.units[number].path
        return sum(c.lines for u, c in zip(units[:number], self._counts, strict=False) if u.path == path)


def _input_order(entry: tuple[int, Reject]) -> tuple[int, float]:
    unit, reject = entry
    return unit, float("inf") if reject.line is None else reject.line  # without a line: the rest of a file
