"""Counting while reading, so that every kind of file counts alike."""

from __future__ import annotations

from typing import Any

import orjson

from weft.data.documents import Counts, Document, Reject
from weft.data.sources.values import Unfit


class Tally:
    """Makes documents and rejects, and counts each one it makes."""

    def __init__(self, counts: Counts):
        self.counts = counts

    def document(self, value: Any, line: int | None, size: int | None = None) -> Document:
        """A document; `size`, in bytes, spares a record's being written once more to know it."""
        counts = self.counts
        counts.documents += 1
        if isinstance(value, str):
            counts.empty += not value
            size = len(value) if value.isascii() else len(value.encode("utf-8"))
        elif size is None:
            size = len(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS))
        counts.bytes += size
        return Document(value, line)

    def reject(self, line: int | None, reason: str | Unfit, hint: str = "") -> Reject:
        """A reject."""
        if isinstance(reason, Unfit):
            reason, hint = reason.reason, reason.hint
        self.counts.rejected[reason] += 1
        return Reject(line, reason, hint)

    def skip_file(self, reason: str) -> None:
        """The file holds no documents at all."""
        self.counts.skipped_files[reason] += 1
