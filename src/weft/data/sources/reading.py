"""How documents are taken out of files, and what of a file one worker reads at once."""

from __future__ import annotations

import os
from dataclasses import dataclass

from weft.config.errors import UserError
from weft.data.sources.template import template_parts

FORMATS = ("jsonl", "json", "text", "csv", "tsv", "parquet", "arrow")


@dataclass(frozen=True)
class Reading:
    """How documents are taken out of files.

    Attributes:
        field: the key of a record's text; "meta.text" looks into nested records.
        template: in place of `field`, a text with "{field}"s in it ("{title}\\n{content}"); "{{" is a brace.
        separator: what stands between the documents of a text file; None: each file is one document.
        records: give whole records (dicts), not texts.
        format: what all files are ("jsonl", ... of FORMATS), whatever their names say.
    """

    field: str = "text"
    template: str | None = None
    separator: str | None = None
    records: bool = False
    format: str | None = None

    def __post_init__(self):
        if self.template is not None:
            template_parts(self.template)  # raises
        if not self.field:
            raise UserError("--field '': names no field; a record's text is at --field text, unless it says otherwise")
        if self.separator == "":
            raise UserError("an empty separator separates nothing; leave it out, and each file is one document")
        if self.format is not None and self.format not in FORMATS:
            raise UserError(f"no such format: {self.format!r}; formats are {', '.join(FORMATS)}")


@dataclass(frozen=True)
class Unit:
    """What one worker reads at once.

    Attributes:
        path: "-" is the standard input.
        kind: the format, and ".gz" or ".zst" behind it: "jsonl.gz".
        start, stop: bytes of JSON lines (a line belongs to the range in which it begins) or row groups of Parquet;
            (0, None): the whole file.
        size: bytes on disk, for a progress bar; 0 of a stream.
    """

    path: str
    kind: str
    start: int
    stop: int | None
    size: int

    @property
    def stream(self) -> bool:
        """Whether only the process that was given it can read it, and once: standard input, or a pipe."""
        return self.path == "-" or not os.path.isfile(self.path)
