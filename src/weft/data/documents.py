"""What sources yield: documents, rejects with their reasons, and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Document(NamedTuple):
    """A document: its text, or the record (a dict) if sources are read with `Reading.records`.

    `line` is the line of the unit, from 1 (the row, in tables). None: the document is a complete file.
    """

    value: Any
    line: int | None


class Reject(NamedTuple):
    """A document that cannot be read or encoded.

    Attributes:
        line: as in `Document`; None: the file itself.
        reason: one of few strings, by which rejects are counted.
        hint: details about this reject.
        on_purpose: the user asked to drop such documents, so the reject never ends a pack.
        last: the last line, if the reject spans several.
    """

    line: int | None
    reason: str
    hint: str = ""
    on_purpose: bool = False
    last: int | None = None

    @property
    def message(self) -> str:
        """The reason and the hint."""
        return f"{self.reason} ({self.hint})" if self.hint else self.reason


@dataclass
class Counts:
    """Counts of one unit, or the sum over several (`add`).

    Attributes:
        documents, empty: all documents, and those with an empty text.
        bytes: UTF-8 bytes of the texts (of the records, with `Reading.records`).
        blank_lines: lines of white space, which are not documents.
        lines: lines (rows, records) of the unit; the offset of the line numbers of the file's next unit.
        rejected: rejects by reason.
        skipped_files: files that hold no text, by reason ("binary").
        raw_bytes, sha256: the unit's bytes on disk (compressed, if the file is) and their digest. A sum has no digest.
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
        """Adds another unit's counts."""
        for name in ("documents", "empty", "blank_lines", "bytes", "lines", "raw_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.rejected.update(other.rejected)
        self.skipped_files.update(other.skipped_files)
