"""A file's bytes in blocks: ranges of lines, decompressed, digested and counted on the way."""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from weft.config.errors import UserError
from weft.data.documents import Counts
from weft.data.sources.reading import Unit

BLOCK = 128 << 10  # bytes read at once: they stay in a core's cache while they are digested and parsed
HEAD = 1 << 20  # so much of a file tells what it is
LONGEST = 256 << 20  # bytes of one document: beyond it, no machine's memory would be safe
BOM = b"\xef\xbb\xbf"
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Broken(Exception):
    """The rest of the file cannot be read. Args: the reason; a hint."""

    def __init__(self, reason: str, hint: str = ""):
        self.reason, self.hint = reason, hint
        super().__init__(reason)


class Raw:
    """Reads a unit's bytes, counts and digests them. As a context manager it closes the file."""

    def __init__(self, unit: Unit, counts: Counts, on_bytes: Callable[[int], None]):
        self.unit, self._counts, self._on_bytes = unit, counts, on_bytes
        self._digest, self._whole = hashlib.sha256(), False
        try:
            self.file: BinaryIO = (
                sys.stdin.buffer if unit.path == "-" else open(unit.path, "rb", buffering=0)  # noqa: SIM115
            )
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", unit.path) from None

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        if self._whole:  # a digest of half a file would only confuse
            self._counts.sha256 = self._digest.hexdigest()
        if self.unit.path != "-":
            self.file.close()

    def read(self, size: int = BLOCK) -> bytes:
        """At most `size` bytes; none at the end."""
        try:
            return self.file.read(size)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", self.unit.path) from None

    def note(self, raw: bytes | memoryview) -> None:
        """These bytes are the unit's: digest, count and show them."""
        self._digest.update(raw)
        self._counts.raw_bytes += len(raw)
        self._on_bytes(len(raw))

    def seek(self, position: int) -> None:
        """Go on from there."""
        self.file.seek(position)

    def begins(self, size: int) -> bytes:
        """The file's first bytes, wherever the unit begins."""
        self.file.seek(0)
        return self.read(size)

    def advance(self, to: int | None) -> None:
        """Note the bytes from here to `to`, or to the end, which are read by something else than this."""
        at = self.file.tell()
        while (to is None or at < to) and (block := self.read(BLOCK if to is None else min(BLOCK, to - at))):
            self.note(block)
            at += len(block)
        self._whole = to is None

    def finish(self) -> None:
        """All of the unit has been noted."""
        self._whole = True

    def blocks(self) -> Iterator[bytes]:
        """All of the file."""
        size = 0
        while block := self.read():
            self.note(block)
            size += len(block)
            if size > self.unit.size and not self.unit.stream:
                break
            yield block
        if size != self.unit.size and not self.unit.stream:
            raise UserError("has changed while it was read; start again when it is whole", self.unit.path)
        self._whole = True

    def whole_lines(self) -> Iterator[bytes]:
        """The lines that begin in the unit's range of bytes, in blocks that end anywhere.

        What is digested and counted are the bytes of the range itself, so that the ranges of a file add up to it.
        """
        start, stop = self.unit.start, self.unit.stop
        if stop is None:
            yield from self.blocks()
            return
        skipping = start > 0  # until a line begins; the byte before `start` may be the end of the line before
        at = start - skipping
        self.file.seek(at)
        last = b"\n"
        while at < stop:
            block = self.read(min(BLOCK, stop - at))
            if not block:
                raise UserError("has changed while it was read; start again when it is whole", self.unit.path)
            self.note(memoryview(block)[1:] if at < start else block)
            at += len(block)
            last = block[-1:]
            if skipping:
                cut = block.find(b"\n") + 1
                skipping = cut == 0
                block = block[cut:] if cut else b""
            if block:
                yield block
        self._whole = True
        while not skipping and last != b"\n" and (block := self.read()):
            cut = block.find(b"\n") + 1
            if cut:
                yield block[:cut]
                return
            yield block


def unpacked(raw: Raw, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """`blocks` decompressed as the unit's kind says; of a stream without a name, as its first bytes say.

    Raises:
        Broken: (from the iterator) the compressed file ends early or is damaged.
    """
    packed = raw.unit.kind.partition(".")[2]
    if raw.unit.stream:
        first = head(blocks, len(ZSTD))
        packed = packed or ("gz" if first.startswith(GZIP) else "zst" if first.startswith(ZSTD) else "")
        blocks = again(first, blocks)
    return _gunzip(blocks) if packed == "gz" else _unzstd(blocks) if packed == "zst" else blocks


def again(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    """`rest` with `first`, which was taken off it, put back."""
    if first:
        yield first
    yield from rest


def _gunzip(blocks: Iterator[bytes]) -> Iterator[bytes]:
    # zlib's own reading of gzip keeps what it has decompressed to itself where it finds the checksum wrong.
    state, held, members = "between", b"", 0
    inflate, checksum, size = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0
    for block in blocks:
        while block:
            if state == "between":
                block = block.lstrip(b"\0") if members else block  # padding behind members, as `gzip` allows
                state, held = ("header", b"") if block else (state, held)
            elif state == "header":
                held += block
                begin = _behind_header(held)
                block = held[begin:] if begin else b""
                if begin:
                    state, inflate, checksum, size = "data", zlib.decompressobj(-zlib.MAX_WBITS), 0, 0
            elif state == "data":
                try:
                    out = inflate.decompress(block, 4 * BLOCK)
                except zlib.error as error:
                    raise Broken("damaged gzip file", str(error)) from None
                checksum, size = zlib.crc32(out, checksum), size + len(out)
                block = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
                if inflate.eof:
                    state, held = "end", b""
                if out:
                    yield out
            else:
                held, block = held + block[: 8 - len(held)], block[8 - len(held) :]
                if len(held) == 8:
                    if held != struct.pack("<II", checksum, size & 0xFFFFFFFF):
                        raise Broken("damaged gzip file: wrong checksum")
                    state, members = "between", members + 1
    if state != "between":
        raise Broken("truncated gzip file")


def _behind_header(data: bytes) -> int:
    """Where a gzip member's header (RFC 1952) ends; 0 if it is not all there."""
    if not (GZIP + b"\x08").startswith(data[:3]) or len(data) > HEAD:
        raise Broken("damaged gzip file", "no header of gzip's")
    if len(data) < 10:
        return 0
    flags, at = data[3], 10
    if flags & 4:  # extra fields
        at += 2 + int.from_bytes(data[at : at + 2], "little")
    for flag in (8, 16):  # a name; a comment
        if flags & flag:
            at = data.find(b"\0", at) + 1
            if not at:
                return 0
    at += 2 * bool(flags & 2)  # the header's checksum
    return at if at < len(data) else 0


def _unzstd(blocks: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**29)
    frame = None
    for block in blocks:
        for begin in range(0, len(block), BLOCK // 8):  # all that a piece holds comes out at once
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


def head(blocks: Iterator[bytes], size: int) -> bytes:
    """The first `size` bytes or more, taken off `blocks`; fewer if there are no more."""
    first = next(blocks, b"")
    while 0 < len(first) < size and (more := next(blocks, b"")):
        first += more
    return first


def wide(first: bytes) -> bool:
    """Whether a file that begins so is in UTF-16, as the mark at its beginning says."""
    return first.startswith((b"\xff\xfe", b"\xfe\xff"))


def without_bom(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """`blocks` without the mark that some editors write before UTF-8."""
    yield head(blocks, len(BOM)).removeprefix(BOM)
    yield from blocks


def whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes | None]:
    """Whole lines, many in one piece of bytes, line ends included; None for a line longer than LONGEST.

    Broken passes through, and takes the unfinished line with it.
    """
    begun: list[bytes | memoryview] = []  # of the unfinished line
    size, too_long = 0, False
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut:
            if too_long:
                yield None
                begun, begin = [], block.find(b"\n") + 1
            else:
                begin = 0
            if begin < cut:
                yield b"".join([*begun, memoryview(block)[begin:cut]])
            begun, size, too_long = [], 0, False
        if cut < len(block) and not too_long:
            begun.append(memoryview(block)[cut:])
            size += len(block) - cut
            if size > LONGEST:
                begun, too_long = [], True
    if too_long:
        yield None
    elif size:
        yield b"".join(begun)


def pieces(blocks: Iterator[bytes], separator: bytes) -> Iterator[list[bytes | None]]:
    """What stands between separators (the leftmost one counts where two overlap), many pieces at a time.

    None stands for a piece longer than LONGEST. A separator at the very end closes the last piece; it opens no empty
    one. Broken passes through, and takes the unfinished piece with it.
    """
    reach = len(separator) - 1  # so many bytes at a block's end may be the beginning of a separator
    begun: list[bytes] = []  # of the unfinished piece
    edge, size, too_long = b"", 0, False
    for block in blocks:
        rest = edge + block if edge else block
        found: list[bytes | None] = list(rest.split(separator))
        if len(found) > 1:
            rest = found.pop() or b""
            if too_long or size:
                found[0] = None if too_long else b"".join([*begun, found[0] or b""])
                begun, size, too_long = [], 0, False
            yield found
        if reach:
            rest, edge = rest[:-reach], rest[-reach:]
        if rest and not too_long:
            begun.append(rest)
            size += len(rest)
            if size > LONGEST:
                begun, too_long = [], True
    if too_long or size or edge:
        yield [None if too_long else b"".join([*begun, edge])]
