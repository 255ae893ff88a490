"""Files of any format as streams of documents: find the files, plan units of work, read each.

    files = find_files(["corpus/", "more/*.jsonl.zst"])
    for unit in plan(files, Reading(field="text")):
        for item in read(unit, Reading(field="text"), Counts()):
            ...                                             # a Document or a Reject

A format is one file of `formats/`, or a class of somebody else's: see docs/data.md, "Add a source format".
"""

from weft.data.sources.find import Files, find_files
from weft.data.sources.read_options import Reading, Unit
from weft.data.sources.reader import plan, read, read_all
from weft.data.sources.source_format import RecordFormat, SourceFormat, Tally
from weft.data.sources.streams import Broken, Raw
from weft.data.sources.values import Unfit, taker

__all__ = [
    "Broken", "Files", "Raw", "Reading", "RecordFormat", "SourceFormat", "Tally", "Unfit", "Unit",
    "find_files", "plan", "read", "read_all", "taker",
]  # fmt: skip
