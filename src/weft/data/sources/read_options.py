"""How documents are taken out of files, and what of a file one worker reads at once."""

from __future__ import annotations

import os
import stat
import string
from dataclasses import dataclass, replace

from weft.errors import UserError


@dataclass(frozen=True)
class Reading:
    """How documents are taken out of files.

    Attributes:
        field: the key of a record's text; "meta.text" looks into nested records.
        template: in place of `field`, a text with "{field}"s in it ("{title}\\n{content}"); "{{" is a brace.
        separator: what stands between the documents of a text file; None: each file is one document.
        records: give whole records (dicts), not texts.
        format: what all files are ("jsonl", ..., or `module:Class`), whatever their names say.
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


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """(literal, the field behind it) pairs.

    Raises:
        UserError: braces that name no field.
    """
    help_ = 'write {field}, as in "{title}\\n{content}", and {{ or }} for a brace itself'
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"template {template!r}: {error}; {help_}") from None
    parts = []
    for literal, name, spec, conversion in parsed:
        if name is not None and (not name.strip() or "[" in name or spec or conversion):
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise UserError(f"template {template!r}: {{{shown}}} names no field; {help_}")
        parts.append((literal, name))
    if not any(name for _, name in parts):
        raise UserError(f"template {template!r}: it names no field; {help_}")
    return parts


@dataclass(frozen=True)
class Unit:
    """What one worker reads at once.

    Attributes:
        path: "-" is the standard input.
        kind: the format, and ".gz" or ".zst" behind it: "jsonl.gz".
        start, stop: of a file that is cut, in its format's own numbers (bytes of JSON lines, row groups of Parquet);
            (0, None): the whole file.
        size: bytes on disk, for a progress bar; 0 of a stream.
    """

    path: str
    kind: str
    start: int
    stop: int | None
    size: int

    @property
    def format(self) -> str:
        """The format's name."""
        return self.kind.removesuffix("." + self.packed) if self.packed else self.kind

    @property
    def packed(self) -> str:
        """How the file is compressed: "gz", "zst", or not at all."""
        end = self.kind.rpartition(".")[2]
        return end if end in ("gz", "zst") else ""

    @property
    def stream(self) -> bool:
        """Whether only the process that was given it can read it, and once: standard input, or a pipe."""
        if self.path == "-":
            return True
        try:
            mode = os.stat(self.path).st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def part(self, start: int, stop: int | None, size: int) -> Unit:
        """A part of the whole file."""
        return replace(self, start=start, stop=stop, size=size)
