"""Streams of documents from files of any format: find the files, split them into units, read each unit.

    files = find_files(["corpus/", "more/*.jsonl.zst"])
    for unit in plan(files, Reading(field="text")):
        for item in read(unit, Reading(field="text"), Counts()):
            ...                                             # a Document or a Reject

A format is one file of `formats/`, or a custom class: see docs/data.md, "Add a source format".
"""

from weft.data.sources.find import Files, find_files
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.reader import plan, read, read_all
from weft.data.sources.source_format import RecordFormat, SourceFormat, Tally
from weft.data.sources.streams import Broken, UnitReader
from weft.data.sources.values import Unfit, make_extractor

__all__ = [
    "Broken", "Files", "Reading", "RecordFormat", "SourceFormat", "Tally", "Unfit", "Unit", "UnitReader",
    "find_files", "make_extractor", "plan", "read", "read_all",
]  # fmt: skip
