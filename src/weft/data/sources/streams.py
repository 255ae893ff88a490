"""A file's bytes in blocks: ranges of lines, decompressed, digested and counted on the way."""

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
from weft.data.sources.values import Unfit
from weft.errors import UserError

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
            raise Broken(f"cannot be read: {error.strerror}") from None

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
            raise Broken(f"cannot be read: {error.strerror}") from None

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

    def content(self, size: int = HEAD) -> tuple[bytes, Iterator[bytes]]:
        """What the file begins with (`size` bytes or more, if there are so many), and all of it in blocks:
        decompressed as its name or, of a stream, its first bytes say, without a mark (BOM) before UTF-8.

        Raises:
            Broken: (also from the iterator) it cannot be read, ends early or is damaged.
        """
        blocks, packed = self.blocks(), self.unit.packed
        if self.unit.stream:
            first, blocks = ahead(blocks, len(ZSTD))
            packed = packed or ("gz" if first.startswith(GZIP) else "zst" if first.startswith(ZSTD) else "")
        if packed:
            blocks = _gunzip(blocks) if packed == "gz" else _unzstd(blocks)
        first, blocks = ahead(blocks, size)
        if first.startswith(BOM):
            next(blocks)
            first = first[len(BOM) :]
            blocks = chain([first], blocks)
        return first, blocks

    def open(self) -> BinaryIO:
        """`content` as a file, for libraries that read from one."""
        return io.BufferedReader(_Blocks(self.content()[1]), BLOCK)


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a file."""

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


def ahead(blocks: Iterator[bytes], size: int) -> tuple[bytes, Iterator[bytes]]:
    """The first `size` bytes or more (fewer if there are no more), and all the blocks, which begin with them."""
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
                block = block.lstrip(b"\0") if members else block  # padding behind members, as `gzip` allows
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
    """What zlib keeps to itself where it finds damage: all that it can make of a block whose end it refuses."""
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


def wide(first: bytes) -> bool:
    """Whether a file that begins so is in UTF-16, as the mark at its beginning says."""
    return first.startswith((b"\xff\xfe", b"\xfe\xff"))


def no_text(first: bytes) -> str:
    """Why a file that begins so holds no text; empty if it may."""
    return "UTF-16" if wide(first) else "binary" if b"\0" in first[:8192] else ""


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


def too_long() -> Unfit:
    """Why a document is none that is longer than any may be."""
    return Unfit(f"longer than {LONGEST >> 20} MiB")


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
