"""Writes safetensors files tensor by tensor and hashes them meanwhile. A file is never fully in memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.checkpoint.checkpoint_files import DTYPES, Digest

_BLOCK = 16 * 2**20


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a CPU tensor, as a safetensors file stores them."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Entry:
    """A tensor to write, or a slice of a tensor.

    Attributes:
        shape: shape of the tensor or slice.
        read: function that returns the tensor or slice, or yields consecutive blocks of its rows, so that only one
            block is in memory.
        offsets: where the slice begins in the tensor, for each dimension; None for a full tensor.
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
    """Returns the name of the most frequent dtype of the entries."""
    return Counter(dtype_name(entry.dtype) for entry in entries).most_common(1)[0][0]


def write_safetensors(
    path: Path,
    entries: Sequence[Entry],
    metadata: Mapping[str, str],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Digest:
    """Writes and fsyncs a safetensors file, and returns its digest.

    Args:
        entries: the tensors to write, with unique names.
        metadata: names and texts for the header's `__metadata__`.
        on_bytes: function that receives the number of tensor bytes written since its last call.
    """
    # Tensors of the widest dtypes come first, so that every tensor is aligned to its element size.
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
            for block in [found] if isinstance(found, torch.Tensor) else found:
                data = byte_view(block.detach().to("cpu", entry.dtype))
                for start in range(0, len(data), _BLOCK):
                    write(data[start : start + _BLOCK])
                    on_bytes(min(_BLOCK, len(data) - start))
                del data, block
            if size - before != entry.bytes or (isinstance(found, torch.Tensor) and tuple(found.shape) != entry.shape):
                raise RuntimeError(
                    f"{entry.name}: the tensor that was read has {size - before:,} bytes and does not match shape "
                    f"{list(entry.shape)}, which needs {entry.bytes:,} bytes"
                )
            del found
        file.flush()
        os.fsync(file.fileno())
    return Digest(digest.hexdigest(), size)


def split_by_size(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """Splits entries, in order, into groups of at most `limit` bytes.

    An entry of more than `limit` bytes is a group of its own. Entries with the same name are in different groups.
    """
    groups: list[list[Entry]] = []
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
