"""Reads the first records of files, and describes how an encoder renders records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.documents import Counts, Document
from weft.data.sources import Reading, plan, read

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
