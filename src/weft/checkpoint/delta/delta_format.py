"""What a delta is on the disk, and how a tensor becomes one.

    delta.json                    what each tensor is, where its delta lies, and the digests
    delta-00001-of-00003.bin      the deltas, one after the other
    model/                        the model's other files: config, tokenizer

A floating-point difference does not give the model back when it is added: both are rounded. The bit patterns, taken as
whole numbers, have an exact difference (it wraps round), whatever they mean; for weights that moved a little it is
small, because neighbouring floats are neighbouring numbers. Small numbers of either sign become small ones without a
sign (zigzag), the first bytes of all of them, mostly zero, are put together, then the second ones, and zstd packs that:
into a tenth less than the exclusive-or of the patterns, and in less time.

Each delta is a row of blocks: four bytes of length, and a zstd frame of so many.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import zstandard

from weft.checkpoint.tensor_file import DTYPES
from weft.errors import UserError
from weft.files import read_json

MANIFEST = "delta.json"
FOLDER = "model"
FORMAT, VERSION = "weft delta", 1
LEVEL = 1  # higher ones take up to five times as long, and pack these bytes no better
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Base:
    """A tensor of the base: what it must be."""

    dtype: str
    shape: list[int]
    sha256: str


@dataclass(frozen=True)
class Line:
    """A tensor of the model.

    Attributes:
        base: the tensor that it is a difference from; None: there is none, and it is a difference from zero.
        sha256: of the model's bytes.
        rows: of a block.
        file, offset, bytes, delta: where its blocks lie, and their SHA-256.
        place: the model's file that it is in, if the model is a Hugging Face folder.
    """

    dtype: str
    shape: list[int]
    base: Base | None
    sha256: str
    rows: int
    file: str
    offset: int
    bytes: int
    delta: str
    place: str | None


@dataclass(frozen=True)
class Manifest:
    """delta.json.

    Attributes:
        huggingface: whether the model is a Hugging Face folder; else it is a checkpoint.
        tensors: the model's, by name.
        removed: the base's that the model does not have.
        files: path below model/ -> SHA-256.
    """

    huggingface: bool
    tensors: dict[str, Line]
    removed: list[str]
    files: dict[str, str]


def is_delta(path: str | Path) -> bool:
    """Whether a folder was made by `weft delta make`."""
    return (Path(path) / MANIFEST).is_file()


def manifest_text(manifest: Manifest) -> dict[str, Any]:
    """The content of delta.json, with its own digest."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return content | {"digest": _digest(content)}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """delta.json, checked by its own digest. Raises UserError, also if one of the delta's files is not whole."""
    content = read_json(path / MANIFEST)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError("this is no delta's; `weft delta make` writes one", path / MANIFEST)
    if content.get("version") != VERSION:
        raise UserError(f"version {content.get('version')} is not known here; take a newer Weft", path / MANIFEST)
    if content.pop("digest", None) != _digest(content):
        raise UserError("damaged: its contents are not what was written; get it again", path / MANIFEST)
    try:
        lines = {
            name: Line(**{**line, "base": Base(**line["base"]) if line["base"] else None})
            for name, line in content["tensors"].items()
        }
        manifest = Manifest(content["huggingface"], lines, content["removed"], content["files"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not what `weft delta make` writes ({error}); get it again", path / MANIFEST) from None
    for name, line in lines.items():
        # Names of files are not to lead out of the delta, or out of the folder that is made of it.
        for file, suffix in ((line.file, ".bin"), (line.place or "a.safetensors", ".safetensors")):
            if Path(file).name != file or Path(file).suffix != suffix:
                raise UserError(f"{name} is said to be in {file!r}, which no delta has; do not use it", path / MANIFEST)
        if line.dtype not in DTYPES or (line.base is not None and line.base.dtype not in DTYPES):
            raise UserError(f"{name} has a dtype that is not known here; take a newer Weft", path / MANIFEST)
    ends: dict[str, int] = {}
    for line in lines.values():
        ends[line.file] = max(ends.get(line.file, 0), line.offset + line.bytes)
    for name, size in ends.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} bytes of {size:,}"
            raise UserError(f"damaged delta: {name} {what}; get it again", path)
    for name, sha256 in manifest.files.items():
        file = path / FOLDER / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            raise UserError("damaged delta: this is not what was written; get it again", file)
    return manifest


# ---- one block


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor as one row of whole numbers."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).view(_INTEGERS[tensor.dtype.itemsize])


def encode(model: torch.Tensor, base: torch.Tensor | None) -> bytes:
    """A block's delta. `base` has the model's dtype, and at the most as many rows; what it lacks is zero."""
    difference = bits(model).clone()
    if base is not None:
        difference[: base.numel()] -= bits(base)
    size = model.dtype.itemsize
    difference = (difference << 1) ^ (difference >> (8 * size - 1))
    planes = np.ascontiguousarray(difference.numpy().view(np.uint8).reshape(-1, size).T)
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)


def decode(delta: bytes, base: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The model's block. Raises ValueError if `delta` is not one of this size."""
    size, count = dtype.itemsize, torch.Size(shape).numel()
    try:
        if zstandard.frame_content_size(delta) != count * size:
            raise ValueError("a block of another size")
        planes = zstandard.ZstdDecompressor().decompress(delta)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    together = np.empty((count, size), np.uint8)
    for place in range(size):  # one by one: four times as fast as turning the whole
        together[:, place] = np.frombuffer(planes, np.uint8, count, place * count)
    zigzag = torch.from_numpy(together.reshape(-1)).view(_INTEGERS[size])
    half = (zigzag >> 1) & torch.iinfo(zigzag.dtype).max  # a shift that brings in zeros
    found = half ^ -(zigzag & 1)
    if base is not None:
        found[: base.numel()] += bits(base)
    return found.view(torch.uint8).view(dtype).reshape(shape)


def comparable(base: tuple[torch.dtype, tuple[int, ...]] | None, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a model's tensor can be a difference from a base's: only the number of rows may differ, and the kind of
    floating-point number."""
    if base is None or len(base[1]) != len(shape) or base[1][1:] != shape[1:]:
        return False
    return base[0] == dtype or (base[0].is_floating_point and dtype.is_floating_point)


def frames(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The blocks from where the file stands to `end`, each as it lies there, without its length."""
    while file.tell() < end:
        length = int.from_bytes(file.read(4), "little")
        frame = file.read(length)
        if len(frame) < length or file.tell() > end:
            raise ValueError("a block ends too early")
        yield frame
