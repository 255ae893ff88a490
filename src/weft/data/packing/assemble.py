"""Appends encoded parts to a store's files, in order, with a journal from which an interrupted pack resumes.

The hidden folder next to the store contains

    request.json      the request of the pack; only a pack with the same request resumes from this folder
    parts/            finished and unfinished parts of the workers
    journal.jsonl     one line per appended part: the content of the part's `.json` file, and the sizes and digests of
                      the store's files after the part was appended
    lengths           number of tokens of each document, int32
    store/            tokens.bin, loss_mask.bin, files of fields and rejects.jsonl; at the end also tokens.idx and
                      store.json

A part's files are deleted when its journal line is written. To resume, the store's files are truncated to the sizes in
the last journal line whose digests match. So data that was damaged or lost in a power failure does not get into a
store.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.data.documents import Counts
from weft.data.packing.part_files import Part, Plan, part_path, remove_part
from weft.data.stores.field_files import field_file
from weft.errors import UserError

BLOCK = 4 << 20
FILES = {
    "tokens": "store/tokens.bin",
    "lengths": "lengths",
    "mask": "store/loss_mask.bin",
    "rejects": "store/rejects.jsonl",
}


class HashedFile:
    """A file to which data is appended. Its size and sha256 are updated with each write."""

    def __init__(self, path: Path):
        self.path, self.size, self.digest = path, 0, hashlib.sha256()
        self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115 (closed by close)

    def verify(self, states: list[tuple[int, str]], on_progress: Callable[[int], None] | None) -> list[Any]:
        """Compares the digests of the file's beginnings with recorded digests, and stops at the first difference.

        Args:
            states: (number of bytes, hexadecimal sha256 of the file's first bytes) pairs, by ascending number.
            on_progress: called with the number of bytes that have been checked so far.

        Returns:
            For each pair before the first difference, the sha256 object of the file's first bytes.
        """
        size, sha256, matches = 0, hashlib.sha256(), []
        for end, digest in states:
            while size < end and (data := self._file.read(min(BLOCK, end - size))):
                sha256.update(data)
                size += len(data)
                if on_progress is not None:
                    on_progress(size)
            if size != end or sha256.hexdigest() != digest:
                break
            matches.append(sha256.copy())
        return matches

    def truncate(self, size: int, sha256: Any) -> None:
        """Truncates the file to its first `size` bytes. `sha256`: the hash object of these bytes."""
        self._file.truncate(size)
        self._file.seek(size)
        self.size, self.digest = size, sha256

    def write(self, data: bytes | memoryview) -> None:
        self.digest.update(data)
        self.size += len(data)
        rest = memoryview(data)
        while len(rest):
            rest = rest[self._file.write(rest) :]

    def append_file(self, path: str) -> None:
        buffer = bytearray(BLOCK)
        with open(path, "rb", buffering=0) as file:
            while number := file.readinto(buffer):
                self.write(memoryview(buffer)[:number])

    def close(self) -> None:
        self._file.close()


class Assembly:
    """Appends parts to a store's files, and sums the counts of the parts.

    Args:
        folder: the hidden folder of the pack.
        mask: whether parts have loss masks.
        fields: names of the fields of the documents.
        lines_before: function that returns the number of lines of the shard's first file that belong to earlier shards;
            None if the pack is not a shard.

    Attributes:
        next: index of the part to append next.
        tokens, documents: numbers of tokens and documents in the store so far.
        counts, notes: sums over the appended parts.
        exact: whether the `tokenizers` library encoded all texts of the first part.
        reason: why `exact` is true, if the user did not request this; otherwise None.
        sources: a dict per input file: its path, size, sha256, numbers of documents and rejected documents, and the
            reason if it was skipped. The digest of a file that was read in several units is the digest of the units'
            concatenated digests.
        first_digests: for a shard, digests of the units of its first input file.
        last_digests: for a shard, digests of the units of its last input file.
    """

    def __init__(
        self, folder: Path, *, mask: bool, fields: Sequence[str] = (), lines_before: Callable[[], int] | None = None
    ):
        self.folder, self.parts = folder, folder / "parts"
        self.next = self.tokens = self.documents = 0
        self.exact, self.reason = False, None
        self.counts, self.notes = Counts(), Counter()
        self.sources: list[dict[str, Any]] = []
        self.first_digests: list[str] = []
        self.last_digests: list[str] = []
        self._lines, self._digest = 0, hashlib.sha256()  # over the units of the last source so far
        self._lines_before, self._shard_offset = lines_before, -1
        self._journal = HashedFile(folder / "journal.jsonl")
        self.fields = fields
        paths = FILES | {field_file(name): f"store/{field_file(name)}" for name in fields}
        self._files = {what: HashedFile(folder / path) for what, path in paths.items() if mask or what != "mask"}

    def resume(self, plan: Plan, on_progress: Callable[[int], None] | None) -> None:
        """Restores the state of an interrupted pack.

        Keeps the parts that were appended before the first part that is damaged or whose input files have changed.

        `on_progress`: called with the number of bytes of `tokens.bin` that have been checked so far.
        """
        entries = list(self._read_journal(plan))
        hashes = {
            what: file.verify([e["files"][what] for e, _ in entries], on_progress if what == "tokens" else None)
            for what, file in self._files.items()
        }
        valid = entries[: min(map(len, hashes.values()))]
        for what, file in self._files.items():
            size = valid[-1][0]["files"][what][0] if valid else 0
            file.truncate(size, hashes[what][len(valid) - 1] if valid else hashlib.sha256())
        self._journal.truncate(sum(entry["journal_bytes"] for entry, _ in valid), hashlib.sha256())
        for entry, part in valid:
            self._add_counts(part, entry["part"])
        for path in self.parts.iterdir():
            # A killed worker leaves hidden files.
            if path.name.startswith(".") or int(path.name.partition(".")[0]) < self.next:
                path.unlink(missing_ok=True)

    def _read_journal(self, plan: Plan) -> Iterator[tuple[dict[str, Any], Part]]:
        with open(self._journal.path, "rb") as journal:
            for line, part in zip(journal, map(plan.part, range(len(plan))), strict=False):
                try:
                    entry = json.loads(line)
                except ValueError:  # an unfinished last line
                    return
                same = entry["part"]["key"] == part.key and self._files.keys() == entry["files"].keys()
                if not line.endswith(b"\n") or not same:
                    return
                yield entry | {"journal_bytes": len(line)}, part

    def file_line(self, part: Part, unit: int, line: int | None, before: int) -> int | None:
        """Converts a line number in a unit of `part` to a line number in the file; None stays None.

        Args:
            part: the part to append next.
            unit: position of the unit in the part.
            before: number of lines of the same file in earlier units of the part.
        """
        if line is None:
            return None
        path = part.units[unit].path
        if self.sources and self.sources[-1]["path"] == path:
            before += self._lines
        first = self.sources[0]["path"] if self.sources else part.units[0].path
        if self._lines_before is not None and path == first:
            if self._shard_offset < 0:
                self._shard_offset = self._lines_before()
            before += self._shard_offset
        return line + before

    def append(self, part: Part, content: dict[str, Any]) -> None:
        """Appends a finished part to the store's files, and deletes the part's files.

        Args:
            content: content of the part's `.json` file.

        Raises:
            UserError: the part is damaged.
            OSError: a file cannot be read or written, for example because the disk is full. The part's files are kept,
                so that a later call can append the part.
        """
        lengths_size = self._files["lengths"].size
        for what, file in self._files.items():
            if what != "rejects":
                file.append_file(part_path(self.parts, part.index, what))
            elif content["rejects"]:
                self._append_rejects(part, content)
        if (self._files["lengths"].size - lengths_size) // 4 != content["documents"]:
            raise UserError(
                "contains damaged work of an unfinished pack; delete this folder and repeat the command", self.folder
            )
        self._add_counts(part, content)
        states = {what: [file.size, file.digest.hexdigest()] for what, file in self._files.items()}
        self._journal.write(json.dumps({"part": content, "files": states}).encode() + b"\n")
        remove_part(self.parts, part.index)

    def _append_rejects(self, part: Part, content: dict[str, Any]) -> None:
        lines: Counter[str] = Counter()  # number of lines of each file in earlier units of this part
        befores = []
        for unit, counts in zip(part.units, content["units"], strict=True):
            befores.append(lines[unit.path])
            lines[unit.path] += counts.get("lines", 0)
        with open(part_path(self.parts, part.index, "rejects"), encoding="utf-8") as file:
            for row in file:
                unit, line, reason, last = json.loads(row)
                entry = {"path": part.units[unit].path, "line": self.file_line(part, unit, line, befores[unit])}
                if last is not None:
                    entry["last_line"] = self.file_line(part, unit, last, befores[unit])
                entry["reason"] = reason
                self._files["rejects"].write(json.dumps(entry).encode() + b"\n")

    def _add_counts(self, part: Part, content: dict[str, Any]) -> None:
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

    def mark_split_files(self, begins: bool, ends: bool) -> None:
        """Adds the digests of units to the sources that are split between shards, so that `merge` can join the shards.

        Args:
            begins: whether the first file begins in an earlier shard.
            ends: whether the last file ends in a later shard.
        """
        only = len(self.sources) == 1
        for split, source, digests in ((begins, 0, self.first_digests), (ends, -1, self.last_digests)):
            if split and self.sources:
                self.sources[source]["cut"] = {
                    "before": begins and (only or source == 0),
                    "after": ends and (only or source == -1),
                    "digests": digests,
                }

    def finish(self, dtype: str) -> dict[str, Any]:
        """Closes the files and writes `tokens.idx`. Returns the files' sha256, keyed by attribute of StoreInfo."""
        from weft.data.stores.indexed import write_index

        for file in self._files.values():
            file.close()
        if self._files["rejects"].size == 0:
            self._files["rejects"].path.unlink()
        digests = {name: self._files[field_file(name)].digest.hexdigest() for name in self.fields}
        return {
            "bin_sha256": self._files["tokens"].digest.hexdigest(),
            "idx_sha256": write_index(self.folder / "store" / "tokens.idx", dtype, self._files["lengths"].path),
            "mask_sha256": self._files["mask"].digest.hexdigest() if "mask" in self._files else None,
            "fields": digests,
        }
