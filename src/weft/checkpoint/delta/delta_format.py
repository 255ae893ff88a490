"""The format of a delta, and the encoding of a tensor.

    delta.json                    each tensor: shape, digests, and where its delta is stored
    delta-00001-of-00003.bin      the deltas of the tensors, concatenated
    model/                        the model's other files: config, tokenizer

Adding a floating-point difference does not restore the model, since both operations round. The bit patterns, taken as
integers, have an exact (wrapping) difference, whatever they mean. It is small for weights that moved little, because
neighboring floats are neighboring integers. Signed differences become unsigned by zigzag encoding; then the first bytes
of all numbers, mostly zero, are grouped, then the second bytes, and zstd compresses the result. That is a tenth smaller
and faster than the exclusive-or of the patterns.

Each delta is a sequence of blocks: a length of four bytes, and a zstd frame of that length.
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
LEVEL = 1  # higher levels take up to five times as long and compress these bytes no better
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BaseTensor:
    """The tensor of the base that a delta applies to."""

    dtype: str
    shape: list[int]
    sha256: str


@dataclass(frozen=True)
class TensorDelta:
    """A tensor of the model.

    Attributes:
        base: the tensor to which the difference is added; None: zeros.
        sha256: digest of the model's tensor.
        rows: rows per block.
        file, offset, bytes, delta: where the blocks are stored, and their SHA-256.
        place: the file that holds the tensor, if the model is a Hugging Face folder.
    """

    dtype: str
    shape: list[int]
    base: BaseTensor | None
    sha256: str
    rows: int
    file: str
    offset: int
    bytes: int
    delta: str
    place: str | None


@dataclass(frozen=True)
class Manifest:
    """The content of delta.json.

    Attributes:
        huggingface: whether the model is a Hugging Face folder; otherwise a checkpoint.
        tensors: the model's, by name.
        removed: tensors of the base that the model lacks.
        files: path below model/ -> SHA-256.
    """

    huggingface: bool
    tensors: dict[str, TensorDelta]
    removed: list[str]
    files: dict[str, str]


def is_delta(path: str | Path) -> bool:
    """Whether `weft delta make` wrote this folder."""
    return (Path(path) / MANIFEST).is_file()


def manifest_content(manifest: Manifest) -> dict[str, Any]:
    """Returns the JSON value of delta.json, with its digest."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return content | {"digest": _digest(content)}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Reads delta.json and checks its digest and the delta's other files. Raises UserError."""
    content = read_json(path / MANIFEST)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError("not the file of a delta; `weft delta make` writes one", path / MANIFEST)
    if content.get("version") != VERSION:
        raise UserError(f"version {content.get('version')} is not supported; use a newer Weft", path / MANIFEST)
    if content.pop("digest", None) != _digest(content):
        raise UserError("damaged: its contents differ from what was written; get it again", path / MANIFEST)
    try:
        tensors = {
            name: TensorDelta(**{**entry, "base": BaseTensor(**entry["base"]) if entry["base"] else None})
            for name, entry in content["tensors"].items()
        }
        manifest = Manifest(content["huggingface"], tensors, content["removed"], content["files"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not what `weft delta make` writes ({error}); get it again", path / MANIFEST) from None
    ends: dict[str, int] = {}
    for name, tensor in tensors.items():
        # File names must not lead out of the delta, or out of the folder that is written from it.
        for file, suffix in ((tensor.file, ".bin"), (tensor.place or "a.safetensors", ".safetensors")):
            if Path(file).name != file or Path(file).suffix != suffix:
                raise UserError(f"{name} is listed in {file!r}, which no delta has; do not use it", path / MANIFEST)
        if tensor.dtype not in DTYPES or (tensor.base is not None and tensor.base.dtype not in DTYPES):
            raise UserError(f"{name} has a dtype that is not supported; use a newer Weft", path / MANIFEST)
        ends[tensor.file] = max(ends.get(tensor.file, 0), tensor.offset + tensor.bytes)
    for name, size in ends.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} bytes of {size:,}"
            raise UserError(f"damaged delta: {name} {what}; get it again", path)
    for name, sha256 in manifest.files.items():
        file = path / FOLDER / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            raise UserError("damaged delta: the file is missing or differs from what was written; get it again", file)
    return manifest


# ---- blocks


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bit patterns of a tensor as a vector of integers."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).view(_INTEGERS[tensor.dtype.itemsize])


def encode(model: torch.Tensor, base: torch.Tensor | None) -> bytes:
    """Returns a block's delta. `base` has the model's dtype and at most as many rows; missing rows are zero."""
    difference = bits(model).clone()
    if base is not None:
        difference[: base.numel()] -= bits(base)
    size = model.dtype.itemsize
    difference = (difference << 1) ^ (difference >> (8 * size - 1))
    planes = np.ascontiguousarray(difference.numpy().view(np.uint8).reshape(-1, size).T)
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)


def decode(delta: bytes, base: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the model's block. Raises ValueError if `delta` is not a block of this size."""
    size, count = dtype.itemsize, torch.Size(shape).numel()
    try:
        if zstandard.frame_content_size(delta) != count * size:
            raise ValueError("a block of another size")
        planes = zstandard.ZstdDecompressor().decompress(delta)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    together = np.empty((count, size), np.uint8)
    for place in range(size):  # one by one: four times as fast as a transposition
        together[:, place] = np.frombuffer(planes, np.uint8, count, place * count)
    zigzag = torch.from_numpy(together.reshape(-1)).view(_INTEGERS[size])
    half = (zigzag >> 1) & torch.iinfo(zigzag.dtype).max  # a logical shift
    found = half ^ -(zigzag & 1)
    if base is not None:
        found[: base.numel()] += bits(base)
    return found.view(torch.uint8).view(dtype).reshape(shape)


def frames(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yields the blocks from the file's position to `end`, without their lengths."""
    while file.tell() < end:
        length = int.from_bytes(file.read(4), "little")
        frame = file.read(length)
        if len(frame) < length or file.tell() > end:
            raise ValueError("a block ends too early")
        yield frame
