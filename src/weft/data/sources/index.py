"""Where each document of a JSON-lines file begins, so that any of them can be read at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from weft.errors import UserError
from weft.files import new_file, read_json, replace_file

CHUNK = 256 << 10  # stays in a core's cache
LONG = 1024  # bytes of a line, from which on searching for the next end beats looking at every byte
VERSION = 1
_BLANK = np.isin(np.arange(256), list(b" \t\n\r\x0b\x0c"))
_BOM = b"\xef\xbb\xbf"


def index_path(path: str | Path) -> Path:
    """Where the index of a file is: uint64 byte offsets `[documents + 1]`, the last one the file's size."""
    return Path(f"{path}.index.npy")


def build_index(path: str | Path, on_bytes: Callable[[int], None] = lambda n: None) -> int:
    """Write `PATH.index.npy`, and `PATH.index.json`, which says of what state of the file it is; whole or not at all.

    A document is a line that is not blank. Memory does not grow with the file.

    Returns:
        The number of documents.

    Raises:
        UserError: the file cannot be read, or changed meanwhile; the disk is full.
    """
    path = Path(path)
    target, about = index_path(path), _about(path)
    try:
        about.unlink(missing_ok=True)  # it is written last: without it, there is no index
        with open(path, "rb", buffering=0) as file, new_file(target) as out:
            before = _state(file.fileno())
            out.write(_header(0))
            documents = -1  # the last offset is the end
            for offsets in _offsets(file, before["size"], on_bytes):
                documents += len(offsets)
                out.write(offsets.data)
            if _state(file.fileno()) != before:
                raise UserError("changed while it was indexed; start again when it is whole", path)
            out.seek(0)
            out.write(_header(documents + 1))
        replace_file(about, json.dumps({"version": VERSION, "documents": documents, **before}) + "\n")
    except OSError as error:
        raise UserError(f"cannot be indexed: {error.strerror}", error.filename or path) from None
    return documents


def is_current(path: str | Path) -> bool:
    """Whether the file has an index that was made of its present state."""
    try:
        return _checked_about(Path(path)) is not None
    except UserError:
        return False


class JsonLines:
    """The records of an indexed JSON-lines file by number: `JsonLines("a.jsonl")[7]`.

    It may be read from many threads and be sent to other processes.

    Raises:
        UserError: there is no index, or the file has changed since it was made.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        documents = _checked_about(self.path)
        try:
            offsets = np.load(index_path(self.path), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            raise UserError("cannot be read; `weft data index` makes it anew", index_path(self.path)) from None
        if offsets.dtype != np.dtype("<u8") or offsets.shape != (documents + 1,):
            raise UserError("damaged; `weft data index` makes it anew", index_path(self.path))
        self.offsets = offsets.view(np.ndarray)  # as a memmap, each look at it would cost microseconds
        self._file: BinaryIO = open(self.path, "rb", buffering=0)  # noqa: SIM115 (open as long as this is)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, number: int) -> bytes:
        """The line of a document, and the blank ones behind it; negative numbers count from the end."""
        documents = len(self)
        if not -documents <= number < documents:
            raise IndexError(f"document {number} of {documents}")
        number %= documents
        begin = self.offsets.item(number)
        # Not by a memory map: a file that is cut short meanwhile would end the process.
        line = os.pread(self._file.fileno(), self.offsets.item(number + 1) - begin, begin)
        return line if begin else line.removeprefix(_BOM)

    def __getitem__(self, number: int) -> Any:
        """The record.

        Raises:
            UserError: its line is broken.
        """
        try:
            return orjson.loads(self.raw(number))
        except orjson.JSONDecodeError:
            pass
        try:
            return json.loads(self.raw(number))  # takes NaN
        except (ValueError, RecursionError) as error:
            raise UserError(f"document {number} is broken: {error}", self.path) from None

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __reduce__(self):
        return JsonLines, (self.path,)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _about(path: Path) -> Path:
    return Path(f"{path}.index.json")


def _state(file: int | Path) -> dict[str, int]:
    status = os.stat(file)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _checked_about(path: Path) -> int:
    """The number of documents of a current index."""
    if not path.exists():
        raise UserError("no such file; check the path", path)
    if not _about(path).exists() or not index_path(path).exists():
        raise UserError(f"has no index; `weft data index {path}` makes one", path)
    content = read_json(_about(path))
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise UserError(f"not an index of this version; `weft data index {path}` makes it anew", _about(path))
    if {name: content.get(name) for name in ("size", "mtime_ns")} != _state(path):
        raise UserError(f"has changed since its index was made; `weft data index {path}` makes it anew", path)
    return int(content["documents"])


def _header(length: int) -> bytes:
    """The head of a .npy file, always of the same size, so that it can be written anew when the length is known."""
    text = f"{{'descr': '<u8', 'fortran_order': False, 'shape': ({length},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def _offsets(file: BinaryIO, end: int, on_bytes: Callable[[int], None]) -> Iterator[np.ndarray]:
    """The beginnings of all lines that are not blank in the first `end` bytes, and the end, as uint64."""
    buffer, lines_are_long = bytearray(CHUNK), False
    view, array = memoryview(buffer), np.frombuffer(buffer, np.uint8)
    base = line = 0  # where the chunk begins; where the unfinished line began
    blank = True  # whether there are only blanks in it so far
    while size := file.readinto(view[: end - base]):  # type: ignore[attr-defined]
        chunk = array[:size]
        ends = _found(buffer, size) if lines_are_long else np.flatnonzero(chunk == 10)
        lines_are_long = size > LONG * len(ends)
        if len(ends):
            starts = ends[:-1] + 1
            keep = ~_BLANK[chunk[starts]]
            for i in np.flatnonzero(~keep & (chunk[starts] != 10)):  # begins with a blank: is there more in it?
                keep[i] = bool(bytes(view[starts[i] : ends[i + 1]]).strip())
            offsets = (starts[keep] + base).astype(np.uint64)
            if not (blank and not bytes(view[: ends[0]]).strip()):
                offsets = np.concatenate([np.array([line], np.uint64), offsets])
            yield offsets
            line, blank = base + int(ends[-1]) + 1, True
        blank = blank and not bytes(view[int(ends[-1]) + 1 if len(ends) else 0 : size]).strip()
        base += size
        on_bytes(size)
    yield np.array([base] if blank else [line, base], np.uint64)


def _found(buffer: bytearray, size: int) -> np.ndarray:
    """The places of line ends, found one after the other."""
    ends = []
    end = buffer.find(b"\n", 0, size)
    while end >= 0:
        ends.append(end)
        end = buffer.find(b"\n", end + 1, size)
    return np.array(ends, np.int64)
