"""Reads checkpoints of torch.distributed.checkpoint (DCP): `.metadata` and `.distcp` files, without unpickling them."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.checkpoint_files import DTYPES
from weft.checkpoint.distributed.inert_pickle import Record, name_of, parse_pickle
from weft.checkpoint.saved_tensor import SavedTensor
from weft.errors import UserError

METADATA = ".metadata"
# What zipfile raises for damaged archives.
_DAMAGED = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, struct.error)
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"


@dataclass(frozen=True)
class _Chunk:
    """A rectangular slice of a tensor, which `torch.save` wrote at `start` of a file.

    Attributes:
        offsets: where the slice begins in the tensor, for each dimension.
        shape: shape of the slice.
        length: number of bytes of the zip archive that `torch.save` wrote.
    """

    file: Path
    start: int
    length: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def is_dcp(path: Path) -> bool:
    """Whether a folder is a checkpoint of torch.distributed.checkpoint."""
    return (path / METADATA).is_file()


def read_dcp(path: Path) -> tuple[dict[str, SavedTensor], list[str]]:
    """Opens the tensors of a checkpoint. Their data are read on demand, one chunk at a time.

    Returns:
        Name -> tensor, and the names of saved objects that are not tensors.

    Raises:
        UserError: a file is missing or damaged, or `.metadata` does not describe a checkpoint of DCP.
    """
    content = parse_pickle(_read_bytes(path / METADATA), path / METADATA)
    if not name_of(content).endswith("checkpoint.metadata.Metadata"):
        raise UserError("not the metadata of torch.distributed.checkpoint; copy the folder again", path / METADATA)
    try:
        return _tensors(path, content)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        what = f"the metadata has an unexpected form ({type(error).__name__}: {error})"
        raise UserError(f"{what}; save the checkpoint with a current version of PyTorch", path / METADATA) from None


def _tensors(path: Path, content: Record) -> tuple[dict[str, SavedTensor], list[str]]:
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, place in content.state["storage_data"].items():
        offset = index.state.get("offset")
        places[index.state["fqn"], None if offset is None else tuple(offset.arguments[0])] = place.state
    tensors, objects = {}, []
    for name, entry in content.state["state_dict_metadata"].items():
        if not name_of(entry).endswith(".TensorStorageMetadata"):
            objects.append(name)
            continue
        shape, dtype = _size(entry.state["size"]), _dtype(entry.state["properties"], name, path)
        chunks = []
        for chunk in entry.state["chunks"]:
            offsets, sizes = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
            place = places[name, offsets] if (name, offsets) in places else places[name, None]
            file = path / place["relative_path"]
            if file.parent != path or not file.is_file():
                raise UserError(f"this file, which {METADATA} lists, is missing; copy the folder again", file)
            if file.stat().st_size < place["offset"] + place["length"]:
                raise UserError("the file is truncated; copy it again", file)
            if place.get("transform_descriptors"):
                raise UserError(f"{name}: compressed checkpoints are not supported; save it without extensions", file)
            chunks.append(_Chunk(file, place["offset"], place["length"], offsets, sizes))
        if not _cover(chunks, shape):
            raise UserError(f"{name}: the saved slices do not cover the tensor; copy the folder again", path / METADATA)
        tensors[name] = SavedTensor(dtype, shape, partial(_read_rows, name, dtype, shape, chunks), reads_all=True)
    return tensors, objects


def _cover(chunks: list[_Chunk], shape: tuple[int, ...]) -> bool:
    """Whether chunks lie within a tensor of the given shape, have its size together, and do not overlap."""
    boxes = sorted([(o, o + s) for o, s in zip(one.offsets, one.shape, strict=True)] for one in chunks)
    inside = all(start >= 0 and end <= size for box in boxes for (start, end), size in zip(box, shape, strict=True))
    if not inside or sum(math.prod(one.shape) for one in chunks) != math.prod(shape):
        return False
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if not box or other[0][0] >= box[0][1]:
                break  # boxes are in the order of their first rows
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                return False
    return True


def _size(record: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in record.arguments[0]) if record.arguments else tuple(map(int, record.added))


def _dtype(properties: Any, name: str, path: Path) -> torch.dtype:
    given = properties.state["dtype"] if isinstance(properties.state, Mapping) else properties.state[0]
    kind = name_of(given).removeprefix("torch.")
    if kind not in DTYPES:
        raise UserError(f"{name} has the dtype {kind!r}, which is not supported; save it in another dtype", path)
    return getattr(torch, kind)


def _read_rows(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: list[_Chunk], start: int, length: int
) -> torch.Tensor:
    """Reads `length` rows, beginning with row `start`, of a tensor; the full tensor if it has no dimensions."""
    if not shape:
        return _read_chunk(name, dtype, chunks[0])
    rows = torch.empty((length, *shape[1:]), dtype=dtype)
    for chunk in chunks:
        first, last = max(start, chunk.offsets[0]), min(start + length, chunk.offsets[0] + chunk.shape[0])
        if first < last and math.prod(chunk.shape):
            rest = tuple(slice(o, o + size) for o, size in zip(chunk.offsets[1:], chunk.shape[1:], strict=True))
            found = _read_chunk(name, dtype, chunk)[first - chunk.offsets[0] : last - chunk.offsets[0]]
            rows[(slice(first - start, last - start), *rest)] = found
    return rows


def _read_chunk(name: str, dtype: torch.dtype, chunk: _Chunk) -> torch.Tensor:
    """Reads a chunk. The archive's description of the tensor must agree with the checkpoint's metadata."""
    rebuilt, read = open_archive(_read_bytes(chunk.file, chunk.start, chunk.length), chunk.file)
    while name_of(rebuilt) == _PARAMETER and rebuilt.arguments:
        rebuilt = rebuilt.arguments[0]
    if name_of(rebuilt) != _TENSOR:
        kind = name_of(rebuilt) or type(rebuilt).__name__
        raise UserError(f"{name}: saved as {kind}, not as a plain tensor; save it as a plain tensor", chunk.file)
    try:
        storage, offset, shape, stride = rebuilt.arguments[:4]
        data = bytearray(read(f"data/{storage[2]}"))
        flat = torch.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)
        found = flat.as_strided(shape, stride, offset)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        what = f"{name}: not a tensor that torch.save wrote ({str(error).splitlines()[0]})"
        raise UserError(f"{what}; copy the file again", chunk.file) from None
    if tuple(found.shape) != chunk.shape:
        raise UserError(f"{name}: the file and {METADATA} contradict each other; copy both again", chunk.file)
    return found


def open_archive(data: bytes, file: Path) -> tuple[Any, Callable[[str], bytes]]:
    """Opens a file that `torch.save` wrote.

    Returns:
        The parsed pickle (`parse_pickle`), and a function that returns the bytes of a further entry, such as "data/0".

    Raises:
        UserError: `torch.save` did not write the file, or it is damaged, compressed or big-endian.
    """
    try:
        opened = zipfile.ZipFile(io.BytesIO(data))
        entries = {info.filename.partition("/")[2]: info for info in opened.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
            raise UserError("compressed files are not supported; save it with torch.save", file)
        content = parse_pickle(opened.read(entries["data.pkl"]), file)
        if "byteorder" in entries and opened.read(entries["byteorder"]) != b"little":
            raise UserError("big-endian tensors are not supported; save it on a little-endian machine", file)
    except (*_DAMAGED, KeyError) as error:
        what = f"not a file that torch.save wrote, or damaged ({error})"
        raise UserError(f"{what}; copy it again, or save it with PyTorch 1.6 or newer", file) from None

    def read(name: str) -> bytes:
        try:
            return opened.read(entries[name])
        except _DAMAGED as error:
            raise UserError(f"the file is damaged ({error}); copy it again", file) from None

    return content, read


def _read_bytes(file: Path, start: int = 0, length: int = -1) -> bytes:
    try:
        with open(file, "rb") as opened:
            opened.seek(start)
            return opened.read(length)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; check the file and its permissions", file) from None
