"""One safetensors file, written tensor by tensor and hashed on its way to the disk: it is never in memory whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from weft.checkpoint.checkpoint_files import Digest

_BLOCK = 16 * 2**20

# torch's names -> those in a safetensors header.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, as a file holds them."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: what the header says of it, and how to get it when its turn has come.

    Attributes:
        read: gives it whole, or in consecutive pieces, of which one is in memory at a time.
        offsets: of a part of a tensor: where in that it begins; None for a whole one.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor | Iterator[torch.Tensor]]
    offsets: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def main_dtype(entries: Sequence[Entry]) -> str:
    """The name of the dtype that most tensors have."""
    kinds = Counter(dtype_name(entry.dtype) for entry in entries)
    return max(kinds, key=lambda kind: kinds[kind])


def write_safetensors(
    path: Path,
    entries: Sequence[Entry],
    metadata: Mapping[str, str],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Digest:
    """Write and fsync a safetensors file.

    Args:
        entries: their names differ.
        metadata: strings for the header.
        on_bytes: is told how many bytes of tensors were written since it was last called.
    """
    # The widest first: then every tensor starts at a multiple of its element size.
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        dtype = DTYPES[dtype_name(entry.dtype)]
        header[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:

        def write(data) -> None:
            nonlocal size
            file.write(data)
            digest.update(data)
            size += len(data)

        write(len(text).to_bytes(8, "little"))
        write(text)
        for entry in entries:
            found, before = entry.read(), size
            for piece in [found] if isinstance(found, torch.Tensor) else found:
                data = byte_view(piece.detach().to("cpu", entry.dtype))
                for start in range(0, len(data), _BLOCK):
                    write(data[start : start + _BLOCK])
                    on_bytes(min(_BLOCK, len(data) - start))
                del data, piece
            if size - before != entry.bytes or (isinstance(found, torch.Tensor) and tuple(found.shape) != entry.shape):
                raise RuntimeError(f"{entry.name}: {size - before:,} bytes where {list(entry.shape)} was planned")
            del found
        file.flush()
        os.fsync(file.fileno())
    return Digest(digest.hexdigest(), size)


_Sized = TypeVar("_Sized", bound=Entry)


def cut(entries: Iterable[_Sized], limit: int) -> list[list[_Sized]]:
    """Entries in their order, in groups of at most `limit` bytes (an entry may be larger), no name twice in one."""
    groups: list[list[_Sized]] = []
    names: set[str] = set()
    room = 0
    for entry in entries:
        if not groups or entry.bytes > room or entry.name in names:
            groups.append([])
            names, room = set(), limit
        groups[-1].append(entry)
        names.add(entry.name)
        room -= entry.bytes
    return groups
