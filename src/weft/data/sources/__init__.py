"""Files of any kind as streams of documents: find the files, plan units of work, read each.

    files = find_files(["corpus/", "more/*.jsonl.zst"])
    for unit in plan(files, Reading(field="text")):
        for item in read(unit, Reading(field="text"), Counts()):
            ...                                             # a Document or a Reject

A kind of file is a module here with `read(unit, reading, tally, on_bytes)` and its line in `kinds.py`.
"""

from weft.data.sources.find import Files, find_files
from weft.data.sources.kinds import plan
from weft.data.sources.reader import read, read_all
from weft.data.sources.reading import FORMATS, Reading, Unit

__all__ = ["FORMATS", "Files", "Reading", "Unit", "find_files", "plan", "read", "read_all"]
