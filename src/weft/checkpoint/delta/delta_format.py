"""The format of a delta, and the encoding of the differences between two tensors.

A delta is a folder:

    delta.json                    for each tensor: shape, digests, and where its differences are stored
    delta-00001-of-00003.bin      the differences of the tensors, concatenated
    model/                        the model's other files, such as config and tokenizer

Subtracting and adding floating-point numbers does not restore the model, because both operations round. Therefore the
bit patterns are subtracted as integers, which is exact (the difference wraps around). The difference is small if a
weight changed little, because the bit patterns of adjacent floats are adjacent integers. Zigzag encoding makes the
signed differences unsigned. Then the bytes are reordered: the lowest byte of every integer, the second byte of every
integer, and so on; the high bytes are mostly zero. Last, zstd compresses the bytes. The result is a tenth smaller than
with an exclusive-or of the bit patterns, and the computation is faster.

The differences of a tensor are stored as a sequence of blocks. Each block is the length of a zstd frame, in four
bytes, then the frame.
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

from weft.checkpoint.checkpoint_files import DTYPES
from weft.errors import UserError
from weft.files import read_json

MANIFEST = "delta.json"
FOLDER = "model"
FORMAT, VERSION = "weft delta", 1
LEVEL = 1  # higher levels take up to five times as long and compress these bytes no better
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BaseTensor:
    """A tensor of the base model, to which a difference is added."""

    dtype: str
    shape: list[int]
    sha256: str


@dataclass(frozen=True)
class TensorDelta:
    """The entry in delta.json that describes one tensor of the model.

    Attributes:
        dtype, shape: dtype and shape of the model's tensor.
        base: the tensor of the base to which the difference is added; None: the difference is added to zeros.
        sha256: SHA-256 of the model's tensor.
        rows: number of rows in a block.
        file, offset, bytes: file that contains the blocks, where the blocks begin in the file, and their total size.
        delta: SHA-256 of the blocks.
        place: name of the safetensors file for the restored tensor; None if the model is not a Hugging Face folder.
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
        huggingface: whether the model is a Hugging Face folder; otherwise, it is a checkpoint.
        tensors: name of a model's tensor -> its entry.
        removed: names of the tensors that are in the base, but not in the model.
        files: path of a file below model/ -> SHA-256 of the file.
    """

    huggingface: bool
    tensors: dict[str, TensorDelta]
    removed: list[str]
    files: dict[str, str]


def is_delta(path: str | Path) -> bool:
    """Whether a path is a folder that `weft delta make` wrote."""
    return (Path(path) / MANIFEST).is_file()


def manifest_content(manifest: Manifest) -> dict[str, Any]:
    """Returns the JSON value of delta.json: the manifest, and a digest of the manifest."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return content | {"digest": _digest(content)}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Reads delta.json. Checks the sizes of the delta's `.bin` files, and the digests of the files below model/.

    Raises:
        UserError: the folder is not a delta, a newer Weft wrote the delta, or a file is missing or damaged.
    """
    content = read_json(path / MANIFEST)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError("not the delta.json of a delta; give a folder that `weft delta make` wrote", path / MANIFEST)
    if content.get("version") != VERSION:
        raise UserError(
            f"version {content.get('version')} of the delta format is not supported; use a newer Weft", path / MANIFEST
        )
    if content.pop("digest", None) != _digest(content):
        raise UserError(
            "damaged file: its contents differ from what was written; download or copy the delta again", path / MANIFEST
        )
    try:
        tensors = {
            name: TensorDelta(**{**entry, "base": BaseTensor(**entry["base"]) if entry["base"] else None})
            for name, entry in content["tensors"].items()
        }
        manifest = Manifest(content["huggingface"], tensors, content["removed"], content["files"])
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"invalid content ({error}); download the delta again, or make it again with `weft delta make`",
            path / MANIFEST,
        ) from None
    ends: dict[str, int] = {}
    for name, tensor in tensors.items():
        # File names must not lead out of the delta, or out of the folder that `weft delta apply` writes.
        for file, suffix in ((tensor.file, ".bin"), (tensor.place or "a.safetensors", ".safetensors")):
            if Path(file).name != file or Path(file).suffix != suffix:
                raise UserError(
                    f"{name} is listed in {file!r}, which is not a file name that Weft writes; do not use this delta",
                    path / MANIFEST,
                )
        if tensor.dtype not in DTYPES or (tensor.base is not None and tensor.base.dtype not in DTYPES):
            raise UserError(f"{name} has a dtype that is not supported; use a newer Weft", path / MANIFEST)
        ends[tensor.file] = max(ends.get(tensor.file, 0), tensor.offset + tensor.bytes)
    for name, size in ends.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise UserError(f"damaged delta: {name} {what}; download or copy the delta again", path)
    for name, sha256 in manifest.files.items():
        file = path / FOLDER / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"the delta lists {name!r}, which is outside of its folder; do not use this delta", path)
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            raise UserError("this file of the delta is missing or damaged; download or copy the delta again", file)
    return manifest


# ---- blocks


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bit patterns of a tensor as a vector of integers."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).view(_INTEGERS[tensor.dtype.itemsize])


def encode(model: torch.Tensor, base: torch.Tensor | None) -> bytes:
    """Returns the compressed difference between a block of the model's tensor and the same block of the base's tensor.

    Args:
        model: a block (consecutive rows) of the model's tensor.
        base: the same rows of the base's tensor, in the model's dtype. Rows that are missing at the end count as zeros;
            None counts as all zeros.
    """
    difference = bits(model).clone()
    if base is not None:
        difference[: base.numel()] -= bits(base)
    size = model.dtype.itemsize
    difference = (difference << 1) ^ (difference >> (8 * size - 1))
    planes = np.ascontiguousarray(difference.numpy().view(np.uint8).reshape(-1, size).T)
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)


def decode(delta: bytes, base: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Restores a block of the model's tensor from a compressed difference.

    Args:
        delta: a result of `encode`.
        base: the `base` that was passed to `encode`.
        dtype, shape: dtype and shape of the model's block.

    Raises:
        ValueError: `delta` is damaged, or is not the difference of a block of this size.
    """
    size, count = dtype.itemsize, torch.Size(shape).numel()
    try:
        if zstandard.frame_content_size(delta) != count * size:
            raise ValueError("the block has another size")
        planes = zstandard.ZstdDecompressor().decompress(delta)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    together = np.empty((count, size), np.uint8)
    for place in range(size):  # a loop over the bytes of a number is four times as fast as a transposition
        together[:, place] = np.frombuffer(planes, np.uint8, count, place * count)
    zigzag = torch.from_numpy(together.reshape(-1)).view(_INTEGERS[size])
    half = (zigzag >> 1) & torch.iinfo(zigzag.dtype).max  # a logical shift
    found = half ^ -(zigzag & 1)
    if base is not None:
        found[: base.numel()] += bits(base)
    return found.view(torch.uint8).view(dtype).reshape(shape)


def frames(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yields the zstd frames from a file's current position to `end`. Raises ValueError if a frame is truncated."""
    while file.tell() < end:
        length = int.from_bytes(file.read(4), "little")
        frame = file.read(length)
        if len(frame) < length or file.tell() > end:
            raise ValueError("a block is truncated")
        yield frame
