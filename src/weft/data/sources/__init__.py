"""Reads documents from files of any format: finds the files, splits them into units, and reads each unit as a stream.

    files = find_files(["corpus/", "more/*.jsonl.zst"])
    for unit in plan(files, Reading(field="text")):
        for item in read(unit, Reading(field="text"), Counts()):
            ...                                             # a Document or a Reject

Each built-in format is a module of `formats/`. For custom formats, see docs/data.md, "Add a source format".
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
