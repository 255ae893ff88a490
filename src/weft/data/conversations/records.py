"""Reads the first records of files, and describes how an encoder renders records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.documents import Counts, Document, Reject
from weft.data.sources import Reading, plan, read
from weft.data.sources.source_format import document_error
from weft.errors import UserError

if TYPE_CHECKING:
    from weft.data.conversations.conversation_encoder import ConversationEncoder

FIRST = 16  # number of records from which the layout is detected


def first_records(files: Sequence[Path], reading: Reading) -> list[Mapping[str, Any]]:
    """Returns up to FIRST records of files; items that are not records are left out."""
    records: list[Mapping[str, Any]] = []
    for unit in plan(files, reading):
        for item in read(unit, reading, Counts()):
            if isinstance(item, Document) and isinstance(item.value, dict):
                records.append(item.value)
                if len(records) == FIRST:
                    return records
    return records


def raise_if_no_record(files: Sequence[Path], reading: Reading) -> None:
    """Raises UserError if the first item of files is not a record, or if the files have no item."""
    for unit in plan(files, reading):
        for item in read(unit, reading, Counts()):
            if isinstance(item, Reject):
                what = "; the file must have one JSON object per record" if "JSON" in item.reason else "; fix the file"
                raise document_error(item.message + what, unit, item.line)
            return
    raise UserError("empty, no record; name files that contain records", files[0] if len(files) == 1 else None)


def describe_encoding(encoder: ConversationEncoder) -> str:
    """Returns the layout, the template and the tokens that are trained on, in one line."""
    spec = encoder.spec
    marks = "by generation marks" if spec.template.marked else "by comparing prefixes"
    learned = {
        "assistant": f"assistant messages, {marks}",
        "last": f"the last assistant message, {marks}",
        "all": "all tokens",
    }
    return f"records: {spec.layout}; template: {spec.template.origin}; trained on: {learned[spec.train_on]}"
