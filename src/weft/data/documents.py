"""What the sources give: documents, rejects with their reason, and counts that add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Document(NamedTuple):
    """A text, or the record itself where records are read.

    `line` is counted from 1 within the unit that was read (a row, in tables); None: the whole file is one document.
    """

    value: Any
    line: int | None


class Reject(NamedTuple):
    """What is no document, and why; `line` as in `Document`, None: the file itself.

    `reason` is one of few, so that rejects can be counted by it; `hint` tells more of this one. `on_purpose`: the user
    asked to leave such documents out; it never ends a pack. `last`: the last line of what takes several.
    """

    line: int | None
    reason: str
    hint: str = ""
    on_purpose: bool = False
    last: int | None = None


@dataclass
class Counts:
    """What one unit held; with `add`, what many did.

    Attributes:
        documents, empty: documents in all, and those of them whose text is empty.
        bytes: UTF-8 bytes of their texts (of the records themselves where records are read).
        blank_lines: lines with nothing but blanks, which are no documents.
        lines: lines (rows, records) of the unit, by which the next unit of the same file counts on.
        rejected: rejects by reason.
        skipped_files: files that are no text at all, by reason ("binary").
        raw_bytes, sha256: the unit's bytes on disk (compressed, if it is) and their digest; no digest of sums.
    """

    documents: int = 0
    empty: int = 0
    blank_lines: int = 0
    bytes: int = 0
    lines: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    skipped_files: Counter[str] = field(default_factory=Counter)
    raw_bytes: int = 0
    sha256: str = ""

    def add(self, other: Counts) -> None:
        """Add another unit's counts to these."""
        for name in ("documents", "empty", "blank_lines", "bytes", "lines", "raw_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.rejected.update(other.rejected)
        self.skipped_files.update(other.skipped_files)
