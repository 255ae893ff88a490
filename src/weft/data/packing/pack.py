"""Documents to a token store: planned in units, encoded by worker processes, put together in order, written whole or
not at all. What a killed pack has done is kept, and the same call goes on."""

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

from weft.data.documents import Counts
from weft.data.output_folder import STORE, check_out, publish
from weft.data.packing.assemble import Assembly
from weft.data.packing.encoder import Encoder, TextEncoder
from weft.data.packing.part_files import Job, Part, Plan, Stop, Unwritable, finished, remove
from weft.data.packing.pool import InProcess, LocalPool, Pool, available_cores
from weft.data.packing.request import claim, request_of, up_to_date
from weft.data.sources import Files, Reading, find_files, plan
from weft.data.sources.find import summary
from weft.data.sources.source_format import holdings, mistake_at
from weft.data.stores.store_json import write_store_json
from weft.errors import UserError
from weft.files import partial_path
from weft.formatting import counted, progress
from weft.observe.console import Console

if TYPE_CHECKING:
    from weft.data.stores.store import StoreInfo
    from weft.data.tokenizers.tokenizer import Tokenizer

RANGE_BYTES = 8 << 20  # of a file that one worker takes at once: cores end together, and a kill loses little
WINDOW = 512  # parts finished ahead of one that is still in work; they wait on the disk


@dataclass(frozen=True)
class Packed:
    """What `pack` did.

    Attributes:
        stored: what `store.json` says.
        seconds: None if the store was up to date already.
        bytes, tokens: text and ids of this call; less than the store's if an earlier one had begun it.
        reason: why the reference library did all, if nobody asked for it.
    """

    stored: dict[str, Any]
    seconds: float | None = None
    bytes: int = 0
    tokens: int = 0
    reason: str | None = None

    @property
    def info(self) -> StoreInfo:
        """`stored`, checked. To import pydantic, which that needs, takes longer than many a pack."""
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
    """Encode all documents of `inputs` into the token store `out`.

    >>> packed = weft.pack(["docs.jsonl"], tokenizer="tok", out="store")
    >>> packed.info.documents
    40

    The store's bytes depend on the input, `tokenizer` and `reading` alone. A call that is killed, interrupted or ended
    by an error leaves what it has done in a hidden folder beside `out`, and the same call goes on from there.

    Args:
        inputs: one, or several, of files, folders, and patterns such as "data/**/*.jsonl".
        out: the store's folder.
        tokenizer: a tokenizer or its folder, for texts that one end-of-document token each closes; or an encoder.
        reading: how documents are taken out of files; default: of records the field "text".
        workers: processes; default: the cores that this process may use.
        on_error: what a document that cannot be read or encoded does: end the pack, or be counted and noted in
            `rejects.jsonl`. Of several, the first in the input is told.
        shard: (i, n): only the i-th of n shares, counted from 1, which `merge` puts together. Their borders depend on
            the input alone.
        overwrite: replace a store that is there (never anything else), and what another call left unfinished.
        ray: the address of a Ray cluster that encodes ("": that of RAY_ADDRESS, or one on this machine).
        range_bytes: how much of a file one worker takes at once.

    Raises:
        UserError: no input, a document that cannot be read, another store at `out`, a full disk.
    """
    console, out, reading = console or Console(speaks=False), Path(out), reading or Reading()
    encoder: Encoder = tokenizer if hasattr(tokenizer, "identity") else TextEncoder(tokenizer)  # type: ignore[arg-type]
    files = find_files([inputs] if isinstance(inputs, str | Path) else inputs)
    # It may lie in a folder that is read: there, stores are left out. But what it would replace must be no input.
    check_out(out, STORE, (path for path in files if path.name in STORE.files), overwrite=overwrite)
    if os.path.lexists(out) and not overwrite:
        request = request_of(encoder, reading, shard, range_bytes, files)
        return Packed(up_to_date(out, request, files))
    work = _Pack(files, out, encoder, reading, shard, range_bytes, console)
    return work.run(workers, on_error == "fail", overwrite, ray)


class _Pack:
    """One call of `pack`."""

    def __init__(
        self,
        files: Files,
        out: Path,
        encoder: Encoder,
        reading: Reading,
        shard: tuple[int, int] | None,
        range_bytes: int,
        console: Console,
    ):
        self._began = time.perf_counter()
        self._files, self._out, self._encoder, self._reading = files, out, encoder, reading
        self._shard, self._range_bytes, self._console = shard, range_bytes, console
        units = plan(files, reading, range_bytes)
        self._streams = any(unit.size == 0 and unit.stream for unit in units)
        if self._streams and shard is not None:
            raise UserError(f"--shard {shard[0]}/{shard[1]}: the standard input cannot be cut into shares; name files")
        self._plan = Plan(units, range_bytes, shard)
        self._folder = partial_path(out)
        self._lock: int | None = None
        self._bar: Any = None
        self._done = self._tokens = 0
        self._packing = self._began  # since when

    def run(self, workers: int | None, fail: bool, overwrite: bool, ray: str | None) -> Packed:
        # First of all: workers take a moment to start, and there is enough to do meanwhile.
        pool = self._open_pool(workers, fail, ray)
        assembly = None
        try:
            request = request_of(self._encoder, self._reading, self._shard, self._range_bytes, self._files)
            self._lock = claim(self._folder, self._out, request, overwrite=overwrite, keep=not self._streams)
            if self._out.exists() and not overwrite:
                raise UserError("was packed by another process meanwhile; --overwrite replaces it", self._out)
            lines_before = partial(self._plan.lines_before, self._reading) if self._shard is not None else None
            assembly = Assembly(self._folder, mask=self._encoder.has_mask, lines_before=lines_before)
            self._go_on(assembly)
            had = (assembly.counts.bytes, assembly.tokens)
            self._packing = time.monotonic()
            with self._console.progress(self._plan.size or None, "packing", unit="B", start=self._done) as self._bar:
                while not self._fill(assembly, pool):
                    pool.close()
                    self._encoder = self._encoder.as_exact()
                    pool = self._open_pool(workers, fail, ray)
                self._done = self._plan.size or self._done
                self._on_progress(0, 0)
            for line in pool.deaths:
                self._console.warning(line)
            pool.dismiss()
            stored = self._finish(assembly, request)
            publish(self._folder / "store", self._out)
            shutil.rmtree(self._folder, ignore_errors=True)
        except BaseException as error:
            pool.close()  # before what it has left is looked at
            self._leave(assembly)
            if isinstance(error, OSError):
                raise _unwritable(error.strerror, self._out) from None
            raise
        finally:
            pool.close()
            if self._lock is not None:
                os.close(self._lock)
        seconds, text = time.perf_counter() - self._began, assembly.counts.bytes
        return Packed(stored, seconds, text - had[0], assembly.tokens - had[1], assembly.reason)

    def _open_pool(self, workers: int | None, fail: bool, ray: str | None) -> Pool:
        cores = workers or available_cores()
        number = 1 if self._streams else min(cores, max(1, len(self._plan)))
        threads = 1 if ray is not None and not self._streams else max(1, cores // number)
        job = Job(str(self._folder.absolute() / "parts"), self._reading, fail, threads)
        if ray is not None and not self._streams:
            from weft.data.packing.ray_pool import RayPool

            return RayPool(job, self._encoder, ray, self._on_progress)
        if number == 1:
            return InProcess(job, self._encoder, self._on_progress)
        return LocalPool(job, self._encoder, number, self._on_progress)

    def _on_progress(self, raw_bytes: int, tokens: int) -> None:
        self._done, self._tokens = self._done + raw_bytes, self._tokens + tokens
        speed = self._tokens / max(time.monotonic() - self._packing, 1e-3)
        fields = {"tokens/s": f"{speed:,.0f}"} if self._tokens else {}
        self._bar.update(min(self._done, self._plan.size or self._done), **fields)

    def _go_on(self, assembly: Assembly) -> None:
        """Take up what an earlier call did."""
        if (self._folder / "journal.jsonl").stat().st_size == 0:
            return assembly.go_on(self._plan)
        size = (self._folder / "store" / "tokens.bin").stat().st_size
        checked = 0

        def on_bytes(number: int) -> None:
            nonlocal checked
            checked += number
            bar.update(min(checked, size))

        with self._console.progress(size, "checking what is there", unit="B") as bar:
            assembly.go_on(self._plan, on_bytes)
        self._done = sum(self._plan.part(index).size for index in range(assembly.next))
        self._console.line(f"going on: {progress(self._done, self._plan.size, 'B')} were packed before")

    def _fill(self, assembly: Assembly, pool: Pool) -> bool:
        """Append all parts, in order, as workers finish them.

        Returns:
            False if that must go on with an exact encoder: the first part told that the fast library is not.
        """
        total, handed = len(self._plan), assembly.next
        held: dict[int, Part] = {}  # handed out, or found finished, and not yet appended
        ready: dict[int, dict[str, Any]] = {}
        failures: dict[int, BaseException] = {}
        while assembly.next < total:
            # After a failure nothing new is begun; what comes before it is waited for, as it may fail as well.
            while not failures and handed < min(total, assembly.next + WINDOW) and pool.room(total - handed):
                part = held[handed] = self._plan.part(handed)
                content = finished(self._folder / "parts", part)
                if content is not None:
                    ready[handed] = content
                    self._on_progress(part.size, 0)
                else:
                    pool.submit(part)
                handed += 1
            self._encoder.open()  # is needed at the end, and takes a moment that workers now have something to do in
            if assembly.next in failures:
                raise self._told(assembly, held[assembly.next], failures[assembly.next])
            if assembly.next in ready:
                content = ready.pop(assembly.next)
                if assembly.next > 0 and assembly.exact and not content["exact"]:
                    for index in (assembly.next, *ready):
                        remove(self._folder / "parts", index)
                    return False
                self._append(assembly, held.pop(assembly.next), content)
            due = assembly.next
            for index, failure in pool.wait(block=due in held and due not in ready and due not in failures):
                if failure is not None:
                    failures[index] = failure
                elif (content := finished(self._folder / "parts", held[index])) is not None:
                    ready[index] = content
                else:
                    raise UserError(
                        "what a worker has written does not appear here; --out must be where all machines see it",
                        self._out,
                    )
        return True

    def _append(self, assembly: Assembly, part: Part, content: dict[str, Any]) -> None:
        if not self._streams and self._plan.part(part.index).key != part.key:
            raise UserError("changed while it was packed; the same command does it again", str(part))
        assembly.append(part, content)

    def _told(self, assembly: Assembly, part: Part, failure: BaseException) -> BaseException:
        """A worker's failure in the user's words."""
        if isinstance(failure, Stop):
            line = assembly.line(part, failure.unit, failure.line, failure.before)
            return mistake_at(failure.what, part.units[failure.unit], line)
        if isinstance(failure, Unwritable):
            return _unwritable(str(failure), self._out)
        return failure

    def _leave(self, assembly: Assembly | None) -> None:
        """After an error: keep what is done, if anything is."""
        if self._lock is None:
            return
        done = assembly is not None and assembly.next > 0
        if self._streams or not (done or any((self._folder / "parts").glob("*.json"))):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _finish(self, assembly: Assembly, request: dict[str, Any]) -> dict[str, Any]:
        """Index and `store.json`; the totals must add up."""
        from weft.data.stores.indexed import token_dtype

        counts, tokenizer = assembly.counts, self._encoder.open()
        if counts.documents == 0 and self._shard is None:
            shutil.rmtree(self._folder)
            reasons = _reasons(counts, self._files.left_out)
            number = counted(len(self._files), "file")
            raise UserError(f"no document in {number} ({reasons}); name files that hold {self._wanted()}")
        read = sum(source["documents"] for source in assembly.sources)
        rejected = sum(source["rejected"] for source in assembly.sources)
        expected = 2 * read if self._encoder.kind == "preferences" else read
        if assembly.documents != expected or rejected != sum(counts.rejected.values()):
            raise UserError(
                f"the totals do not add up ({assembly.documents:,} packed of {read:,} read, {rejected:,} rejected); "
                "this is a mistake in Weft: please report it",
                self._out,
            )
        dtype = str(token_dtype(tokenizer.vocab_size))
        # Of shares, the first tells what no share reads: together they tell it once.
        left_out = self._files.left_out if self._shard is None or self._shard[0] == 1 else Counter()
        assembly.mark_cuts(*self._plan.cut)
        stored = {
            "version": 1,
            "kind": self._encoder.kind,
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
            "skipped_files": dict(counts.skipped_files + left_out),
            "notes": dict(assembly.notes),
            **assembly.finish(dtype),
            "sources": assembly.sources,
            "made_from": request,
        }
        return write_store_json(self._folder / "store", stored)

    def _wanted(self) -> str:
        """What the files should hold."""
        if self._reading.records:
            return "records of conversations"
        held = set(holdings(self._files, self._reading).values())
        return "text" if held == {"text"} else f"{'rows' if held <= {'rows'} else 'records'} with text"


def _unwritable(reason: str | None, out: Path) -> UserError:
    return UserError(f"cannot be written: {reason}; what is done is kept, and the same command goes on", out)


def _reasons(counts: Counts, left_out: Counter[str]) -> str:
    said = [f"{reason}: {number:,}" for reason, number in counts.rejected.items()]
    if skipped := counts.skipped_files + left_out:
        said.append(f"skipped {summary(skipped)}")
    return ", ".join(said) or "all blank"
