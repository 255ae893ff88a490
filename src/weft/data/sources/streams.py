"""Reads the bytes of a unit (a file, or a range of a file) in blocks, and splits the blocks into lines.

`UnitReader` also decompresses, hashes and counts the bytes.
"""

from __future__ import annotations

import hashlib
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, BinaryIO

from weft.data.documents import Counts
from weft.data.sources.read_options import Unit
from weft.data.sources.values import SourceError, Unfit
from weft.errors import UserError

BLOCK = 128 << 10  # bytes per read: a block stays in a core's cache while it is hashed and parsed
HEAD = 1 << 20  # bytes from which the content of a file is detected
LONGEST = 256 << 20  # maximum bytes of one document, to limit memory
BOM = b"\xef\xbb\xbf"
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Broken(SourceError):
    """Raised if a file, or the rest of a file, cannot be read."""


class UnitReader:
    """A context manager that opens the file of a unit, and reads, counts and hashes the unit's bytes.

    Args:
        counts: receives the number of bytes and, if the unit was read completely, their sha256.
        on_bytes: called with the number of bytes of each block.
    """

    def __init__(self, unit: Unit, counts: Counts, on_bytes: Callable[[int], None]):
        self.unit, self._counts, self._on_bytes = unit, counts, on_bytes
        self._digest, self._complete = hashlib.sha256(), False
        try:
            self.file: BinaryIO = (
                sys.stdin.buffer if unit.path == "-" else open(unit.path, "rb", buffering=0)  # noqa: SIM115
            )
        except OSError as error:
            raise Broken(f"cannot be read: {error.strerror}") from None

    def __enter__(self) -> UnitReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._complete:  # a partly read unit has no digest
            self._counts.sha256 = self._digest.hexdigest()
        if self.unit.path != "-":
            self.file.close()

    def read(self, size: int = BLOCK) -> bytes:
        """Returns at most `size` bytes; b"" at the end of the file."""
        try:
            return self.file.read(size)
        except OSError as error:
            raise Broken(f"cannot be read: {error.strerror}") from None

    def _count(self, raw: bytes | memoryview) -> None:
        self._digest.update(raw)
        self._counts.raw_bytes += len(raw)
        self._on_bytes(len(raw))

    def head(self, size: int) -> bytes:
        """Returns the first `size` bytes of the file, even if the unit begins later."""
        self.file.seek(0)
        return self.read(size)

    def count_to(self, position: int | None, *, complete: bool = True) -> None:
        """Counts and hashes the bytes from the current file position to `position`.

        A format calls this method if another library parses the file.

        Args:
            position: byte offset in the file; None: the end of the file.
            complete: whether these are the last bytes of the unit.
        """
        at = self.file.tell()
        while (position is None or at < position) and (
            block := self.read(BLOCK if position is None else min(BLOCK, position - at))
        ):
            self._count(block)
            at += len(block)
        self._complete = complete

    def blocks(self) -> Iterator[bytes]:
        size = 0
        while block := self.read():
            self._count(block)
            size += len(block)
            if size > self.unit.size and not self.unit.stream:
                break
            yield block
        if size != self.unit.size and not self.unit.stream:
            raise self._changed()
        self._complete = True

    def _changed(self) -> UserError:
        return UserError(
            "has changed while it was read; repeat the command when no program writes to this file", self.unit.path
        )

    def line_blocks(self) -> Iterator[bytes]:
        """Yields, as blocks of bytes, the lines that begin in the unit's byte range. A block can end within a line.

        The last line can end after the range. Its bytes after the range are yielded, but not hashed or counted,
        because they belong to the next range.
        """
        start, stop = self.unit.start, self.unit.stop
        if stop is None:
            yield from self.blocks()
            return
        # Skip to the first line that begins in the range: the byte before `start` can be a line end.
        skipping = start > 0
        at = start - skipping
        self.file.seek(at)
        last = b"\n"
        while at < stop:
            block = self.read(min(BLOCK, stop - at))
            if not block:
                raise self._changed()
            self._count(memoryview(block)[1:] if at < start else block)
            at += len(block)
            last = block[-1:]
            if skipping:
                begin = block.find(b"\n") + 1
                skipping = begin == 0
                block = block[begin:] if begin else b""
            if block:
                yield block
        self._complete = True
        while not skipping and last != b"\n" and (block := self.read()):
            end = block.find(b"\n") + 1
            if end:
                yield block[:end]
                return
            yield block

    def content(self, size: int = HEAD) -> tuple[bytes, Iterator[bytes]]:
        """Returns at least the first `size` bytes (all bytes of a shorter file), and an iterator over the full content.

        The content is decompressed: files according to their suffix, streams according to their first bytes. A UTF-8
        BOM is removed.

        Raises:
            Broken: the file cannot be read, is truncated or is damaged. The iterator can raise it too.
        """
        blocks, compression = self.blocks(), self.unit.compression
        if self.unit.stream:
            first, blocks = peek_blocks(blocks, len(ZSTD))
            compression = compression or ("gz" if first.startswith(GZIP) else "zst" if first.startswith(ZSTD) else "")
        if compression:
            blocks = _gunzip(blocks) if compression == "gz" else _unzstd(blocks)
        first, blocks = peek_blocks(blocks, size)
        if first.startswith(BOM):
            next(blocks)
            first = first[len(BOM) :]
            blocks = chain([first], blocks)
        return first, blocks

    def open(self) -> BinaryIO:
        """Returns the decompressed content as a file object, for libraries that read from file objects."""
        return io.BufferedReader(_BlockFile(self.content()[1]), BLOCK)


class _BlockFile(io.RawIOBase):
    """A read-only file object whose content is an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._rest = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def peek_blocks(blocks: Iterator[bytes], size: int) -> tuple[bytes, Iterator[bytes]]:
    """Returns at least the first `size` bytes (fewer if the blocks end before), and an iterator over all blocks.

    The iterator yields the returned bytes too.
    """
    first = next(blocks, b"")
    while 0 < len(first) < size and (more := next(blocks, b"")):
        first += more
    return first, chain([first], blocks) if first else blocks


def _gunzip(blocks: Iterator[bytes]) -> Iterator[bytes]:
    # The gzip module reads 8 KiB at a time, which takes a third longer.
    member, members = None, 0
    for block in blocks:
        while block:
            if member is None:
                block = block.lstrip(b"\0") if members else block  # `gzip` allows padding after members
                member, members = zlib.decompressobj(16 + zlib.MAX_WBITS) if block else None, members + 1
                continue
            before = member.copy()
            try:
                out = member.decompress(block, 4 * BLOCK)
            except zlib.error as error:
                yield _before_damage(before, block)
                wrong = str(error).endswith(("incorrect data check", "incorrect length check"))
                raise Broken("damaged gzip file" + (": wrong checksum" if wrong else ""), str(error)) from None
            if out:
                yield out
            block, member = (member.unused_data, None) if member.eof else (member.unconsumed_tail, member)
    if member is not None:
        raise Broken("truncated gzip file")


def _before_damage(member: Any, block: bytes) -> bytes:
    """Returns the decompressed content of the longest undamaged prefix of a block.

    zlib drops this content when it raises an error.

    Args:
        member: copy of the zlib decompressor, before it decompressed the block.
    """
    found, good, bad = b"", 0, len(block)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            found, good = member.copy().decompress(block[:middle]), middle
        except zlib.error:
            bad = middle
    return found


def _unzstd(blocks: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**29)
    frame = None
    for block in blocks:
        for begin in range(0, len(block), BLOCK // 8):  # a piece is decompressed in one step: small pieces bound memory
            piece = block[begin : begin + BLOCK // 8]
            while piece:
                frame = frame or decompressor.decompressobj()
                try:
                    out = frame.decompress(piece)
                except zstandard.ZstdError as error:
                    raise Broken("damaged zstd file", str(error)) from None
                piece = b""
                if frame.eof:
                    piece, frame = frame.unused_data, None
                if out:
                    yield out
    if frame is not None:
        raise Broken("truncated zstd file")


def is_utf16(first: bytes) -> bool:
    """Whether a file that begins with `first` has a UTF-16 BOM."""
    return first.startswith((b"\xff\xfe", b"\xfe\xff"))


def skip_reason(first: bytes) -> str:
    """Returns why a file that begins with `first` is not read as text ("UTF-16", "binary"); empty if it can be text."""
    return "UTF-16" if is_utf16(first) else "binary" if b"\0" in first[:8192] else ""


def split_lines(blocks: Iterator[bytes]) -> Iterator[bytes | None]:
    """Yields bytes objects of one or more complete lines with line ends; None in place of a line over LONGEST bytes.

    If `blocks` raises Broken, the unfinished line is dropped.
    """
    unfinished: list[bytes | memoryview] = []
    size, overlong = 0, False
    for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            begin = 0
            if overlong:
                yield None
                begin = block.find(b"\n") + 1
            if begin < end:
                yield b"".join([*unfinished, memoryview(block)[begin:end]])
            unfinished, size, overlong = [], 0, False
        if end < len(block) and not overlong:
            unfinished.append(memoryview(block)[end:])
            size += len(block) - end
            if size > LONGEST:
                unfinished, overlong = [], True
    if overlong:
        yield None
    elif size:
        yield b"".join(unfinished)


def too_long() -> Unfit:
    return Unfit(f"longer than {LONGEST >> 20} MiB")


def split_by(blocks: Iterator[bytes], separator: bytes) -> Iterator[list[bytes | None]]:
    """Splits the content at each separator, and yields lists of consecutive pieces.

    If separators overlap, the content is split at the leftmost one. None stands for a piece over LONGEST bytes. A
    separator at the end of the content adds no empty piece. If `blocks` raises Broken, the unfinished piece is dropped.
    """
    reach = len(separator) - 1  # number of bytes at the end of a block that can be the beginning of a separator
    unfinished: list[bytes] = []
    edge, size, overlong = b"", 0, False
    for block in blocks:
        rest = edge + block if edge else block
        found: list[bytes | None] = list(rest.split(separator))
        if len(found) > 1:
            rest = found.pop() or b""
            if overlong or size:
                found[0] = None if overlong else b"".join([*unfinished, found[0] or b""])
                unfinished, size, overlong = [], 0, False
            yield found
        if reach:
            rest, edge = rest[:-reach], rest[-reach:]
        if rest and not overlong:
            unfinished.append(rest)
            size += len(rest)
            if size > LONGEST:
                unfinished, overlong = [], True
    if overlong or size or edge:
        yield [None if overlong else b"".join([*unfinished, edge])]
