"""Defines what sources yield: documents, rejected documents with reasons, and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Document(NamedTuple):
    """A document that was read from a source.

    Attributes:
        value: the text; with `Reading.records`, the record (a dict).
        line: number of the line, row or record (`SourceFormat.item`) at which the document begins: 1 is the first one
            of the unit (a file, or a range of a file). None: the document is a complete file.
    """

    value: Any
    line: int | None


class Reject(NamedTuple):
    """A rejected document: a document that cannot be read or encoded.

    Attributes:
        line: number of the line, row or record at which the document begins, as in `Document`. None: the complete file,
            or the rest of the file, is rejected.
        reason: a short fixed description, by which rejected documents are counted.
        hint: details about this document.
        last: number of the last line, if the document spans several lines.
    """

    line: int | None
    reason: str
    hint: str = ""
    last: int | None = None

    @property
    def message(self) -> str:
        """The reason with the hint, if there is a hint."""
        return f"{self.reason} ({self.hint})" if self.hint else self.reason


@dataclass
class Counts:
    """Counts of the documents and bytes of one unit (a file, or a range of a file), or their sums over several units.

    Attributes:
        documents: number of documents, including documents with an empty text.
        empty: number of documents with an empty text.
        bytes: number of UTF-8 bytes of the texts (with `Reading.records`: of the records).
        blank_lines: number of lines that contain only white space; they are not documents.
        lines: number of lines, rows or records. A document's line number in the file is its line number in the unit
            plus the `lines` of all earlier units of the file.
        rejected: reason -> number of rejected documents.
        skipped_files: reason (such as "binary") -> number of skipped files, which contain no text.
        raw_bytes, sha256: number of bytes on disk (compressed, if the file is compressed), and their digest. Sums over
            units have no digest.
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
        """Adds the counts of another unit."""
        for name in ("documents", "empty", "blank_lines", "bytes", "lines", "raw_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.rejected.update(other.rejected)
        self.skipped_files.update(other.skipped_files)
