"""Defines how documents are extracted from files (`Reading`), and the range that a worker reads (`Unit`)."""

from __future__ import annotations

import os
import stat
import string
from dataclasses import dataclass

from weft.errors import UserError


@dataclass(frozen=True)
class Reading:
    """Options for extracting documents from files.

    Attributes:
        field: the key of the text in a record; "meta.text" is a path into a nested record.
        template: used instead of `field`: a text in which `{key}` stands for the record's value of `key`, such as
            "{title}\\n{content}"; "{{" stands for "{".
        separator: the text between the documents of a text file; None: each file is one document.
        records: whether documents are records (dicts) instead of texts.
        format: the format of all files: a name such as "jsonl", or `module:Class`; None: detected from file names.
    """

    field: str = "text"
    template: str | None = None
    separator: str | None = None
    records: bool = False
    format: str | None = None

    def __post_init__(self):
        if self.template is not None:
            parse_template(self.template)  # raises
        if not self.field:
            raise UserError("--field '': the name is empty; give the key of a record's text, such as --field text")
        if self.separator == "":
            raise UserError("--separator '': the separator is empty; omit it to read each file as one document")


def parse_template(template: str) -> list[tuple[str, str | None]]:
    """Parses a template into pairs (text before a field, name of the field). Raises UserError for invalid braces.

    For text after the last field, the name is None.
    """
    remedy = 'write {field}, as in "{title}\\n{content}", and {{ or }} for a brace'
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"template {template!r}: {error}; {remedy}") from None
    for _, name, spec, conversion in parsed:
        if name is not None and (not name.strip() or "[" in name or spec or conversion):
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise UserError(f"template {template!r}: {{{shown}}} is not the name of a field; {remedy}")
    if not any(name for _, name, *_ in parsed):
        raise UserError(f"template {template!r}: names no field; {remedy}")
    return [(literal, name) for literal, name, *_ in parsed]


@dataclass(frozen=True)
class Unit:
    """A file, or a range of a file, that one worker reads.

    Attributes:
        path: "-" is the standard input.
        format: the name of the format.
        compression: "gz", "zst" or "".
        start, stop: the range, counted in `SourceFormat.positions` (bytes, row groups); (0, None): the full file.
        size: number of bytes on disk; 0 for a stream.
    """

    path: str
    format: str
    compression: str = ""
    start: int = 0
    stop: int | None = None
    size: int = 0

    @property
    def stream(self) -> bool:
        """Whether the unit is the standard input or a pipe: only this process can read it, and only once."""
        if self.path == "-":
            return True
        try:
            mode = os.stat(self.path).st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
