"""Builds and reads indexes of JSON-lines files: the byte offsets of the documents, for random access."""

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
LONG = 1024  # mean number of bytes per line above which bytearray.find is faster than numpy
VERSION = 1
_BLANK = np.isin(np.arange(256), list(b" \t\n\r\x0b\x0c"))
_BOM = b"\xef\xbb\xbf"


def index_path(path: str | Path) -> Path:
    """Returns the path of a file's index.

    The index contains byte offsets (uint64, `[documents + 1]`); the last offset is the size of the file.
    """
    return Path(f"{path}.index.npy")


def build_index(path: str | Path, on_bytes: Callable[[int], None] = lambda n: None) -> int:
    """Writes the index of a JSON-lines file, atomically and in constant memory. Blank lines are not documents.

    The files are `PATH.index.npy` (the offsets), and `PATH.index.json` (the size and modification time of the file).

    Args:
        on_bytes: called with the number of bytes that were read since the last call.

    Returns:
        The number of documents.

    Raises:
        UserError: the file cannot be read, the file changed during the call, or the disk is full.
    """
    path = Path(path)
    target, metadata = index_path(path), _metadata_path(path)
    try:
        metadata.unlink(missing_ok=True)  # written last: an index without it is not valid
        with open(path, "rb", buffering=0) as file, new_file(target) as out:
            before = _file_state(file.fileno())
            out.write(_header(0))
            documents = -1  # the last offset is the end
            for offsets in _offsets(file, before["size"], on_bytes):
                documents += len(offsets)
                out.write(offsets.data)
            if _file_state(file.fileno()) != before:
                raise UserError(
                    "changed while it was indexed; repeat the command when no program writes to this file", path
                )
            out.seek(0)
            out.write(_header(documents + 1))
        replace_file(metadata, json.dumps({"version": VERSION, "documents": documents, **before}) + "\n")
    except OSError as error:
        raise UserError(f"cannot be indexed: {error.strerror}", error.filename or path) from None
    return documents


def is_current(path: str | Path) -> bool:
    """Whether the file has an index, and has not changed since it was indexed."""
    try:
        return _count_documents(Path(path)) is not None
    except UserError:
        return False


class JsonLines:
    """Random access to the records of an indexed JSON-lines file: `JsonLines("a.jsonl")[7]`.

    The object is thread-safe and can be pickled. The constructor raises UserError if the file is missing, has no index,
    or has changed since it was indexed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        documents = _count_documents(self.path)
        try:
            offsets = np.load(index_path(self.path), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            raise UserError(f"cannot be read; {_remedy(self.path)}", index_path(self.path)) from None
        if offsets.dtype != np.dtype("<u8") or offsets.shape != (documents + 1,):
            raise UserError(f"damaged; {_remedy(self.path)}", index_path(self.path))
        self.offsets = offsets.view(np.ndarray)  # indexing a memmap is slower by microseconds
        self._file: BinaryIO = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed by close)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, number: int) -> bytes:
        """Returns the bytes of a document's line and of the blank lines after it. `number` can be negative."""
        documents = len(self)
        if not -documents <= number < documents:
            raise IndexError(f"document {number} is out of range: the file has {documents} documents")
        number %= documents
        begin = self.offsets.item(number)
        # Not a memory map: if the file is truncated meanwhile, a memory map would crash the process.
        line = os.pread(self._file.fileno(), self.offsets.item(number + 1) - begin, begin)
        return line if begin else line.removeprefix(_BOM)

    def __getitem__(self, number: int) -> Any:
        """Returns the record of a document; raises UserError if its line is not valid JSON."""
        try:
            return orjson.loads(self.raw(number))
        except orjson.JSONDecodeError:
            pass
        try:
            return json.loads(self.raw(number))  # accepts NaN
        except (ValueError, RecursionError) as error:
            raise UserError(f"document {number} is not valid JSON: {error}; correct the file", self.path) from None

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __reduce__(self):
        return JsonLines, (self.path,)

    def close(self) -> None:
        self._file.close()


def _metadata_path(path: Path) -> Path:
    return Path(f"{path}.index.json")


def _file_state(file: int | Path) -> dict[str, int]:
    status = os.stat(file)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _remedy(path: Path) -> str:
    return f"run `weft data index {path}`"


def _count_documents(path: Path) -> int:
    """Returns the number of documents in a file's index; raises UserError if the index is missing or out of date."""
    if not path.exists():
        raise UserError("no such file; check the path", path)
    if not _metadata_path(path).exists() or not index_path(path).exists():
        raise UserError(f"has no index; {_remedy(path)}", path)
    content = read_json(_metadata_path(path))
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise UserError(f"not an index of this version of Weft; {_remedy(path)}", _metadata_path(path))
    if {name: content.get(name) for name in ("size", "mtime_ns")} != _file_state(path):
        raise UserError(f"has changed since it was indexed; {_remedy(path)}", path)
    return int(content["documents"])


def _header(length: int) -> bytes:
    """Returns the header of a .npy file. All headers have equal sizes, so a header can be replaced later."""
    text = f"{{'descr': '<u8', 'fortran_order': False, 'shape': ({length},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def _offsets(file: BinaryIO, end: int, on_bytes: Callable[[int], None]) -> Iterator[np.ndarray]:
    """Yields the byte offsets of the non-blank lines in the first `end` bytes, and finally `end`, in uint64 arrays."""
    buffer, lines_are_long = bytearray(CHUNK), False
    view, array = memoryview(buffer), np.frombuffer(buffer, np.uint8)
    base = line = 0  # offsets of the chunk and of the unfinished line
    blank = True  # whether the unfinished line is blank so far
    while size := file.readinto(view[: end - base]):  # type: ignore[attr-defined]
        chunk = array[:size]
        ends = _find_line_ends(buffer, size) if lines_are_long else np.flatnonzero(chunk == 10)
        lines_are_long = size > LONG * len(ends)
        if len(ends):
            starts = ends[:-1] + 1
            keep = ~_BLANK[chunk[starts]]
            for i in np.flatnonzero(~keep & (chunk[starts] != 10)):  # starts with a blank: check the rest of the line
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


def _find_line_ends(buffer: bytearray, size: int) -> np.ndarray:
    """Returns the offsets of the line ends in the first `size` bytes of `buffer`; fast if the lines are long."""
    ends = []
    end = buffer.find(b"\n", 0, size)
    while end >= 0:
        ends.append(end)
        end = buffer.find(b"\n", end + 1, size)
    return np.array(ends, np.int64)
