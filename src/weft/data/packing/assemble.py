"""Parts put together, in order, into a store's files; a journal lets a killed pack go on where it was.

The hidden folder beside the store holds

    request.json      what is asked for; another request does not go on with this folder
    parts/            what workers have finished, or are writing
    journal.jsonl     a line for each part that was appended: its key and counts, and the files' sizes and digests then
    lengths           int32, of each document
    store/            tokens.bin, loss_mask.bin and rejects.jsonl, and at the end tokens.idx and store.json

A part's files are deleted when its journal line is written. To go on, the files are cut to the sizes of the last line
whose digests they have: nothing that was damaged, or had not reached the disk when the power went, gets into a store.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from weft.data.documents import Counts
from weft.data.packing.part_files import Part, Plan, part_file, remove
from weft.errors import UserError

BLOCK = 4 << 20
FILES = {
    "tokens": "store/tokens.bin",
    "lengths": "lengths",
    "mask": "store/loss_mask.bin",
    "rejects": "store/rejects.jsonl",
}


class Growing:
    """A file that is appended to, with its size and sha256."""

    def __init__(self, path: Path):
        self.path, self.size, self.digest = path, 0, hashlib.sha256()
        self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115 (closed by close)

    def check(self, states: Iterable[tuple[int, str]], on_bytes: Callable[[int], None]) -> int:
        """How many of `states` (sizes that grow, and the digests then) the file has been through; it is read so far."""
        self.cut(0)
        held = 0
        for size, digest in states:
            self._read_to(size, on_bytes)
            if self.size != size or self.digest.hexdigest() != digest:
                break
            held += 1
        return held

    def cut(self, size: int) -> None:
        """Go back to the first `size` bytes; what is behind them stays until `trim`."""
        if size != self.size:
            self._file.seek(0)
            self.size, self.digest = 0, hashlib.sha256()
            self._read_to(size, lambda number: None)

    def trim(self) -> None:
        """Drop what is behind the place reached."""
        self._file.truncate(self.size)
        self._file.seek(self.size)

    def _read_to(self, size: int, on_bytes: Callable[[int], None]) -> None:
        while self.size < size and (data := self._file.read(min(BLOCK, size - self.size))):
            self.digest.update(data)
            self.size += len(data)
            on_bytes(len(data))

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        self.digest.update(data)
        self.size += len(data)
        rest = memoryview(data)
        while len(rest):
            rest = rest[self._file.write(rest) :]

    def take(self, path: str) -> None:
        """Append a file's bytes."""
        buffer = bytearray(BLOCK)
        with open(path, "rb", buffering=0) as file:
            while number := file.readinto(buffer):
                self.write(memoryview(buffer)[:number])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Assembly:
    """A store's files as parts are appended.

    Args:
        folder: the hidden one, see above.
        mask: whether parts have loss masks.
        lines_before: of a shard: tells how many lines of the first part's first file lie before it, in another shard.

    Attributes:
        next: the part to append next.
        counts, notes: of all appended parts. `tokens`, `documents`: what was packed.
        exact, reason: whether the first part went through the reference library, and why, if nobody asked for it.
        sources: path, size, sha256, documents and rejected of each file so far, and why it was skipped if it is no
            text. The digest of a file that was read in several units is that of their digests, one after the other.
        first_digests, last_digests: of a shard: of the units of the first source and of the last.
    """

    def __init__(self, folder: Path, *, mask: bool, lines_before: Callable[[], int] | None = None):
        self.folder, self.parts = folder, folder / "parts"
        self.next = self.tokens = self.documents = 0
        self.exact, self.reason = False, None
        self.counts, self.notes = Counts(), Counter()
        self.sources: list[dict[str, Any]] = []
        self.first_digests: list[str] = []
        self.last_digests: list[str] = []
        self._lines, self._digest = 0, hashlib.sha256()  # of the last source's units so far
        self._lines_before, self._before = lines_before, -1
        self._journal = Growing(folder / "journal.jsonl")
        self._files = {what: Growing(folder / path) for what, path in FILES.items() if mask or what != "mask"}

    def go_on(self, plan: Plan, on_bytes: Callable[[int], None] = lambda number: None) -> None:
        """Take up what an earlier process appended, as far as it was made of the same parts and is undamaged.

        Args:
            on_bytes: is told how many bytes have been checked.
        """
        entries = list(self._entries(plan))
        held = len(entries)
        for what, file in self._files.items():
            held = min(held, file.check((entry["files"][what] for entry, _ in entries[:held]), on_bytes))
        for what, file in self._files.items():
            file.cut(entries[held - 1][0]["files"][what][0] if held else 0)
            file.trim()
        self._journal.cut(sum(entry["journal_bytes"] for entry, _ in entries[:held]))
        self._journal.trim()
        for entry, part in entries[:held]:
            self._account(part, entry["part"])
        for path in self.parts.iterdir():
            # A hidden file is one that a killed worker did not finish.
            if path.name.startswith(".") or int(path.name.partition(".")[0]) < self.next:
                path.unlink(missing_ok=True)

    def _entries(self, plan: Plan) -> Iterator[tuple[dict[str, Any], Part]]:
        with open(self._journal.path, "rb") as journal:
            for line, part in zip(journal, map(plan.part, range(len(plan))), strict=False):
                try:
                    entry = json.loads(line)
                except ValueError:  # the last one, cut off by a kill
                    return
                if (
                    not line.endswith(b"\n")
                    or entry["part"]["key"] != part.key
                    or self._files.keys() != entry["files"].keys()
                ):
                    return
                yield entry | {"journal_bytes": len(line)}, part

    def line(self, part: Part, unit: int, line: int | None, before: int) -> int | None:
        """The line in the file, of a line in a unit of the part that comes next.

        Args:
            before: lines of the same file in earlier units of that part.
        """
        if line is None:
            return None
        path = part.units[unit].path
        if self.sources and self.sources[-1]["path"] == path:
            before += self._lines
        first = self.sources[0]["path"] if self.sources else part.units[0].path
        if self._lines_before is not None and path == first:
            if self._before < 0:
                self._before = self._lines_before()
            before += self._before
        return line + before

    def append(self, part: Part, content: dict[str, Any]) -> None:
        """Append a finished part, and delete its files.

        Args:
            content: what its `.json` says.

        Raises:
            UserError: it is not what it says.
            OSError: a full disk, and the like. The same part can be appended later, by another process.
        """
        before = {what: file.size for what, file in self._files.items()}
        for what, file in self._files.items():
            if what != "rejects":
                file.take(part_file(self.parts, part.index, what))
            elif content["rejects"]:
                self._append_rejects(part, content)
        documents = (self._files["lengths"].size - before["lengths"]) // 4
        if documents != content["documents"]:
            raise UserError("a finished part is damaged; remove the folder and pack again", self.folder)
        self._account(part, content)
        states = {what: [file.size, file.digest.hexdigest()] for what, file in self._files.items()}
        self._journal.write(json.dumps({"part": content, "files": states}).encode() + b"\n")
        remove(self.parts, part.index)

    def _append_rejects(self, part: Part, content: dict[str, Any]) -> None:
        before: dict[str, int] = {}  # lines of each path in earlier units of this part
        befores = []
        for unit, counts in zip(part.units, content["units"], strict=True):
            befores.append(before.get(unit.path, 0))
            before[unit.path] = befores[-1] + counts.get("lines", 0)
        with open(part_file(self.parts, part.index, "rejects"), encoding="utf-8") as file:
            for row in file:
                unit, line, reason, last = json.loads(row)
                entry = {"path": part.units[unit].path, "line": self.line(part, unit, line, befores[unit])}
                if last is not None:
                    entry["last_line"] = self.line(part, unit, last, befores[unit])
                entry["reason"] = reason
                self._files["rejects"].write(json.dumps(entry).encode() + b"\n")

    def _account(self, part: Part, content: dict[str, Any]) -> None:
        self.next = part.index + 1
        self.tokens += content["tokens"]
        self.documents += content["documents"]
        self.notes.update(content["notes"])
        if part.index == 0:
            self.exact, self.reason = content["exact"], content["reason"]
        for unit, plain in zip(part.units, content["units"], strict=True):
            counts = Counts(**plain)
            self.counts.add(counts)
            if not self.sources or self.sources[-1]["path"] != unit.path:
                self.sources.append({"path": unit.path, "size": 0, "sha256": "", "documents": 0, "rejected": 0})
                self._lines, self._digest, self.last_digests = 0, hashlib.sha256(), []
            source = self.sources[-1]
            source["size"] += counts.raw_bytes
            source["documents"] += counts.documents
            source["rejected"] += sum(counts.rejected.values())
            for reason in counts.skipped_files:
                source["skipped"] = reason
            self._digest.update(counts.sha256.encode())
            source["sha256"] = self._digest.hexdigest() if source["sha256"] else counts.sha256
            if self._lines_before is not None:
                self.last_digests.append(counts.sha256)
                if len(self.sources) == 1:
                    self.first_digests = self.last_digests
            self._lines += counts.lines

    def mark_cuts(self, begins: bool, ends: bool) -> None:
        """Of a shard: note the digests of what it has of files that are cut, so that `merge` can join them."""
        for cut, source, digests in ((begins, 0, self.first_digests), (ends, -1, self.last_digests)):
            if cut and self.sources:
                whole = len(self.sources) == 1
                self.sources[source]["cut"] = {
                    "before": begins and (whole or source == 0),
                    "after": ends and (whole or source == -1),
                    "digests": digests,
                }

    def finish(self, dtype: str) -> dict[str, str | None]:
        """Write the index.

        Returns:
            The sha256 of `tokens.bin`, `tokens.idx` and, with masks, `loss_mask.bin`, by StoreInfo's names.
        """
        from weft.data.stores.indexed import write_index

        for file in self._files.values():
            file.close()
        digests: dict[str, str | None] = {"bin_sha256": self._files["tokens"].digest.hexdigest()}
        digests["idx_sha256"] = write_index(self.folder / "store" / "tokens.idx", dtype, self._files["lengths"].path)
        digests["mask_sha256"] = self._files["mask"].digest.hexdigest() if "mask" in self._files else None
        if self._files["rejects"].size == 0:
            self._files["rejects"].path.unlink()
        return digests
