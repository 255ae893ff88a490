"""Packs documents into a token store.

The inputs are split into units (files, or ranges of files), and consecutive units are grouped into parts. Workers
encode parts, and this process appends them to the store in order. The same call resumes an interrupted pack.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.data.output_folder import STORE, check_out, publish
from weft.data.packing.assemble import Assembly
from weft.data.packing.encoder import Encoder, TextEncoder
from weft.data.packing.part_files import DocumentFailure, Job, Part, Plan, WriteFailure, read_finished, remove_part
from weft.data.packing.pool import InProcess, LocalPool, Pool, available_cores
from weft.data.packing.request import check_rejected, lock_folder, make_request, no_document, read_existing
from weft.data.sources import Files, Reading, find_files, plan
from weft.data.sources.source_format import document_error
from weft.data.stores.store_json import write_store_json
from weft.errors import UserError
from weft.files import partial_path
from weft.formatting import progress
from weft.observe.console import Console

if TYPE_CHECKING:
    from weft.data.stores.store import StoreInfo
    from weft.data.tokenizers.tokenizer import Tokenizer

RANGE_BYTES = 8 << 20  # size of a unit: so small that all cores finish together, and a kill loses little work
WINDOW = 512  # maximum number of finished parts that wait on disk for an earlier part


@dataclass(frozen=True)
class Packed:
    """The result of `pack`.

    Attributes:
        stored: the content of `store.json`.
        seconds: duration of the call; None if the store was up to date.
        bytes, tokens: numbers of text bytes and tokens that this call added to the store. They are less than the
            store's totals if the call resumed an earlier call.
        reason: why the `tokenizers` library encoded all texts, if the user did not request this.
    """

    stored: dict[str, Any]
    seconds: float | None = None
    bytes: int = 0
    tokens: int = 0
    reason: str | None = None

    @property
    def info(self) -> StoreInfo:
        """The validated `stored`. The first access imports pydantic, which can take longer than the pack itself."""
        from weft.data.stores.store import StoreInfo

        return StoreInfo.model_validate(self.stored)


def pack(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    tokenizer: Encoder | Tokenizer | str | Path,
    *,
    reading: Reading | None = None,
    workers: int | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    shard: tuple[int, int] | None = None,
    overwrite: bool = False,
    ray: str | None = None,
    console: Console | None = None,
    range_bytes: int = RANGE_BYTES,
) -> Packed:
    """Encodes all documents of `inputs` into the token store `out`.

    >>> packed = weft.pack(["docs.jsonl"], tokenizer="tok", out="store")
    >>> packed.info.documents
    40

    The store's bytes depend only on the inputs, `tokenizer` and `reading`. If a call is killed, interrupted or fails,
    its work is kept in a hidden folder next to `out`, and the same call resumes it.

    Args:
        inputs: one or several files, folders, and patterns such as "data/**/*.jsonl".
        out: the store's folder.
        tokenizer: for texts, a tokenizer or its folder; an end-of-document token is appended to each text. For other
            documents, an encoder.
        reading: how documents are extracted from files; default: the field "text" of records.
        workers: number of processes; default: the number of cores that this process is allowed to use.
        on_error: for documents that cannot be read or encoded: "fail" raises an error for the first of these documents,
            "skip" counts them and lists them in `rejects.jsonl`.
        shard: (i, n): pack only shard i of n, counted from 1; `merge` joins the shards. The borders of shards depend
            only on the inputs.
        overwrite: replace an existing store (and nothing else), and the unfinished work of a different call.
        ray: address of the Ray cluster that encodes ("": the address in RAY_ADDRESS, or a new cluster on this machine).
        range_bytes: approximate number of bytes of a unit, the range of a file that a worker reads at a time.

    Raises:
        UserError: no input or no text is found, a document cannot be read or encoded, `out` is another store, or the
            disk is full.
    """
    console, out, reading = console or Console(prints=False), Path(out), reading or Reading()
    encoder: Encoder = tokenizer if hasattr(tokenizer, "identity") else TextEncoder(tokenizer)  # type: ignore[arg-type]
    files = find_files([inputs] if isinstance(inputs, str | Path) else inputs)
    # `out` can lie in an input folder, where stores are skipped. But a store that is replaced must contain no input.
    check_out(out, STORE, (path for path in files if path.name in STORE.files), overwrite=overwrite)
    fail = on_error == "fail"
    if os.path.lexists(out) and not overwrite:
        stored = read_existing(out, make_request(encoder, reading, shard, range_bytes, files), files)
        check_rejected(out, stored["rejected"], encoder, fail=fail)
        return Packed(stored)
    return _PackJob(files, out, encoder, reading, workers, fail, shard, overwrite, ray, console, range_bytes).run()


@dataclass
class _PackJob:
    """One call of `pack`. `fail`: whether to stop at the first rejected document."""

    files: Files
    out: Path
    encoder: Encoder
    reading: Reading
    workers: int | None
    fail: bool
    shard: tuple[int, int] | None
    overwrite: bool
    ray: str | None
    console: Console
    range_bytes: int

    def __post_init__(self):
        self._began = self._encoding_since = time.perf_counter()
        units = plan(self.files, self.reading, self.range_bytes)
        self._streams = any(unit.size == 0 and unit.stream for unit in units)
        if self._streams and self.shard is not None:
            raise UserError(f"--shard {self.shard[0]}/{self.shard[1]}: the standard input cannot be split; use files")
        self._plan = Plan(units, self.range_bytes, self.shard)
        self._folder = partial_path(self.out)
        self._lock: int | None = None
        self._bar: Any = None
        self._done = self._tokens = 0

    def run(self) -> Packed:
        pool = self._open_pool()  # first, because workers start in the background
        assembly = None
        try:
            request = make_request(self.encoder, self.reading, self.shard, self.range_bytes, self.files)
            self._lock = lock_folder(self._folder, self.out, request, overwrite=self.overwrite, keep=not self._streams)
            if self.out.exists() and not self.overwrite:
                raise UserError("was created while this command ran; use --overwrite to replace it", self.out)
            lines_before = partial(self._plan.lines_before, self.reading) if self.shard is not None else None
            fields = self.encoder.fields
            assembly = Assembly(self._folder, mask=self.encoder.has_mask, fields=fields, lines_before=lines_before)
            self._resume(assembly)
            resumed_bytes, resumed_tokens = assembly.counts.bytes, assembly.tokens
            self._encoding_since = time.monotonic()
            with self.console.progress(self._plan.size or None, "packing", unit="B", start=self._done) as self._bar:
                while not self._encode_parts(assembly, pool):
                    pool.close()
                    self.encoder = self.encoder.as_exact()
                    pool = self._open_pool()
                self._done = self._plan.size or self._done
                self._on_progress(0, 0)
            for line in pool.warnings:
                self.console.warning(line)
            pool.dismiss()
            stored = self._finish(assembly, request)
            publish(self._folder / "store", self.out)
            shutil.rmtree(self._folder, ignore_errors=True)
        except BaseException as error:
            pool.close()  # before the parts are listed
            self._remove_empty(assembly)
            if isinstance(error, OSError):
                raise _write_error(error.strerror, self.out) from None
            raise
        finally:
            pool.close()
            if self._lock is not None:
                os.close(self._lock)
        return Packed(
            stored,
            time.perf_counter() - self._began,
            assembly.counts.bytes - resumed_bytes,
            assembly.tokens - resumed_tokens,
            assembly.reason,
        )

    def _open_pool(self) -> Pool:
        cores = self.workers or available_cores()
        folder = str(self._folder.absolute() / "parts")
        if self.ray is not None and not self._streams:
            from weft.data.packing.ray_pool import RayPool

            return RayPool(Job(folder, self.reading, self.fail), self.encoder, self.ray, self._on_progress)
        number = 1 if self._streams else min(cores, max(1, len(self._plan)))
        job = Job(folder, self.reading, self.fail, threads=max(1, cores // number))
        if number == 1:
            return InProcess(job, self.encoder, self._on_progress)
        return LocalPool(job, self.encoder, number, self._on_progress)

    def _on_progress(self, raw_bytes: int, tokens: int) -> None:
        self._done, self._tokens = self._done + raw_bytes, self._tokens + tokens
        speed = self._tokens / max(time.monotonic() - self._encoding_since, 1e-3)
        fields = {"tokens/s": f"{speed:,.0f}"} if self._tokens else {}
        self._bar.update(min(self._done, self._plan.size or self._done), **fields)

    def _resume(self, assembly: Assembly) -> None:
        if (self._folder / "journal.jsonl").stat().st_size == 0:
            return assembly.resume(self._plan, None)
        size = (self._folder / "store" / "tokens.bin").stat().st_size
        with self.console.progress(size, "checking earlier work", unit="B") as bar:
            assembly.resume(self._plan, bar.update)
        self._done = sum(self._plan.part(index).size for index in range(assembly.next))
        self.console.line(f"resuming: {progress(self._done, self._plan.size, 'B')} were packed before")

    def _encode_parts(self, assembly: Assembly, pool: Pool) -> bool:
        """Encodes all parts in the pool, and appends them to the store in order.

        Returns:
            True if all parts were appended. False if the first part required the `tokenizers` library, but later
            parts were encoded with gigatoken. The later parts are then removed, and the caller encodes them again.
        """
        total, submitted = len(self._plan), assembly.next
        pending: dict[int, Part] = {}  # parts that are submitted or finished, but not appended
        ready: dict[int, dict[str, Any]] = {}  # content of the `.json` files of finished parts
        failures: dict[int, BaseException] = {}
        while assembly.next < total:
            # After a failure, no part is submitted. Earlier parts are still awaited: the first failure is reported.
            while not failures and submitted < min(total, assembly.next + WINDOW) and pool.has_room(total - submitted):
                part = pending[submitted] = self._plan.part(submitted)
                content = read_finished(self._folder / "parts", part)
                if content is not None:
                    ready[submitted] = content
                    self._on_progress(part.size, 0)
                else:
                    pool.submit(part)
                submitted += 1
            self.encoder.open()  # needed at the end: loaded now, while workers encode
            due = assembly.next
            if due in failures:
                raise self._as_user_error(assembly, pending[due], failures[due])
            if due in ready:
                content = ready.pop(due)
                if due > 0 and assembly.exact and not content["exact"]:
                    for index in (due, *ready):
                        remove_part(self._folder / "parts", index)
                    return False
                self._append(assembly, pending.pop(due), content)
            due = assembly.next
            for index, failure in pool.wait(block=due in pending and due not in ready and due not in failures):
                if failure is not None:
                    failures[index] = failure
                elif (content := read_finished(self._folder / "parts", pending[index])) is not None:
                    ready[index] = content
                else:
                    what = "files of a worker are missing on this machine; put --out on storage that all machines share"
                    raise UserError(what, self.out)
        return True

    def _append(self, assembly: Assembly, part: Part, content: dict[str, Any]) -> None:
        if not self._streams and self._plan.part(part.index).key != part.key:
            raise UserError("changed while it was packed; repeat the command to pack it again", str(part))
        assembly.append(part, content)

    def _as_user_error(self, assembly: Assembly, part: Part, failure: BaseException) -> BaseException:
        """Converts the failure of a worker to a UserError; returns a failure of an unknown kind unchanged."""
        if isinstance(failure, DocumentFailure):
            line = assembly.file_line(part, failure.unit, failure.line, failure.before)
            return document_error(failure.what, part.units[failure.unit], line)
        if isinstance(failure, WriteFailure):
            return _write_error(str(failure), self.out)
        return failure

    def _remove_empty(self, assembly: Assembly | None) -> None:
        """Removes the hidden folder of this pack after an error, unless another call can resume the work in it."""
        if self._lock is None:
            return
        done = assembly is not None and assembly.next > 0
        if self._streams or not (done or any((self._folder / "parts").glob("*.json"))):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _finish(self, assembly: Assembly, request: dict[str, Any]) -> dict[str, Any]:
        """Writes `tokens.idx` and `store.json`; returns the content of `store.json`.

        Raises:
            UserError: no document with text was packed, or the totals do not add up.
        """
        from weft.data.stores.indexed import token_dtype

        counts, tokenizer = assembly.counts, self.encoder.open()
        check_rejected(self.out, counts.rejected, self.encoder, fail=self.fail)
        if counts.documents == counts.empty and self.shard is None:
            shutil.rmtree(self._folder)
            raise no_document(counts, self.files, self.reading, self.encoder)
        read = sum(source["documents"] for source in assembly.sources)
        rejected = sum(source["rejected"] for source in assembly.sources)
        expected = 2 * read if self.encoder.kind == "preferences" else read
        if assembly.documents != expected or rejected != sum(counts.rejected.values()):
            raise UserError(
                f"the totals do not add up ({assembly.documents:,} packed of {read:,} read, {rejected:,} rejected); "
                "this is a bug in Weft: please report it",
                self.out,
            )
        dtype = str(token_dtype(tokenizer.vocab_size))
        # Only the first shard records the skipped files, so that merged shards record them once.
        skipped = self.files.skipped if self.shard is None or self.shard[0] == 1 else Counter()
        assembly.mark_split_files(*self._plan.split)
        stored = {
            "version": 1,
            "kind": self.encoder.kind,
            "chat_template": self.encoder.chat_template,
            "tokenizer_digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "dtype": dtype,
            "documents": assembly.documents,
            "tokens": assembly.tokens,
            "bytes": counts.bytes,
            "empty_documents": counts.empty,
            "blank_lines": counts.blank_lines,
            "rejected": dict(counts.rejected),
            "skipped_files": dict(counts.skipped_files + skipped),
            "notes": dict(assembly.notes),
            **assembly.finish(dtype),
            "sources": assembly.sources,
            "made_from": request,
        }
        return write_store_json(self._folder / "store", stored)


def _write_error(reason: str | None, out: Path) -> UserError:
    return UserError(f"cannot be written: {reason}; fix this and repeat the command, which resumes the work", out)
