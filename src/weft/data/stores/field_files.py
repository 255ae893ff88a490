"""Names and writes the files of a token store's fields: one float32 number per document, such as a label."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

from weft.errors import UserError

# Keys of samples, which a field must not be called: see `weft.data.batches.layout`.
TAKEN = ("tokens", "labels", "weight", "positions", "segments", "samples")


def field_file(name: str) -> str:
    """Returns the name of the file of a field in a token store."""
    return f"field.{name}.bin"


def check_field_names(names: list[str]) -> None:
    """Raises UserError if a name is not valid for a field."""
    for number, name in enumerate(names):
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name in TAKEN or name in names[:number]:
            taken = "given twice" if name in names[:number] else "a key of samples" if name in TAKEN else "not a name"
            raise UserError(
                f"--document-fields {','.join(names)}: {name!r} is {taken}; use other letters, digits and _"
            )


class FieldWriter:
    """Writes the file of one field, and computes its digest."""

    def __init__(self, folder: Path, name: str):
        self.file, self.digest = open(folder / field_file(name), "wb"), hashlib.sha256()  # noqa: SIM115

    def add(self, values: np.ndarray) -> None:
        """Appends the values of documents."""
        data = np.ascontiguousarray(values, "<f4").data
        self.file.write(data)
        self.digest.update(data)

    def finish(self) -> str:
        """Closes the file. Returns its sha256."""
        self.file.close()
        return self.digest.hexdigest()
