"""Where torch.distributed.checkpoint (DCP) puts its tensors: safetensors files and one JSON index, no pickle anywhere.

DCP plans who writes what and reshards on loading; only the files are ours. Its own `hf_storage` reads every rank's
headers on every rank, guesses the tensors' shapes from them and makes each file in memory first; here an index is
written, and the bytes are hashed on their way to the disk. The files keep `hf_storage`'s names and headers, so
PyTorch's own `HuggingFaceStorageReader` reads them as well.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from weft.checkpoint.files import INDEX, Digest, threads, write_json
from weft.checkpoint.tensor_file import Entry, dtype_name, write_safetensors

# Several files a rank, so that several threads write and hash them.
FILE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor in one file."""

    file: str
    digest: Digest
    dtype: str
    shape: tuple[int, ...]


class SafetensorsWriter(StorageWriter):
    """Writes each rank's tensors into a directory that exists, and on rank 0 the index.

    Args:
        tied: other names of a model's tied weights -> the name that the tensor is saved under.

    Attributes:
        digests: on rank 0, after the save, every written file's name -> digest.
    """

    def __init__(self, directory: Path, tied: dict[str, str]):
        self.directory = directory
        self.tied = tied
        self.digests: dict[str, Digest] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        self.digests = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Numbers the ranks. Raises OSError when the disk has no room for it all: better now than half written."""
        needed = sum(_size(item) for plan in plans for item in plan.items)
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needed:,} bytes needed, {free:,} free)")
        return [dataclasses.replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        groups = _groups([item for item in plan.items if _size(item)])
        names = [
            f"shard-{plan.storage_data + 1:05d}-model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
            for number in range(len(groups))
        ]
        with ThreadPoolExecutor(threads()) as pool:
            written = pool.map(lambda name, items: self._write_file(name, items, planner), names, groups)
            results = [result for file in written for result in file]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        entries = [
            Entry(
                item.index.fqn,
                item.tensor_data.properties.dtype,
                tuple(item.tensor_data.chunk.sizes),
                partial(planner.resolve_data, item),
            )
            for item in items
        ]
        offsets = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in items}
        extra = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        what = write_safetensors(self.directory / name, entries, extra)
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=_size(item),
                storage_data=Piece(
                    name, what, dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes)
                ),
            )
            for item in items
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: write the index of all tensors and their pieces."""
        pieces: dict[str, list] = {name: [] for name in metadata.state_dict_metadata}
        files: dict[str, int] = {}
        for result in (result for rank in results for result in rank):
            piece: Piece = result.storage_data
            self.digests[piece.file] = piece.digest
            number = files.setdefault(piece.file, len(files))
            pieces[result.index.fqn].append([number, list(result.index.offset or ()), list(piece.shape)])
        tensors = {
            name: {
                "dtype": dtype_name(entry.properties.dtype),
                "shape": list(entry.size),
                "pieces": sorted(pieces[name], key=lambda piece: piece[1]),
            }
            for name, entry in sorted(metadata.state_dict_metadata.items())
        }
        content = {
            "format": "weft checkpoint",
            "version": 1,
            "files": list(files),
            "tied": self.tied,
            "tensors": tensors,
        }
        self.digests[INDEX] = write_json(self.directory / INDEX, content)


def _size(item: WriteItem) -> int:
    """Bytes of a planned piece (`item.tensor_storage_size()` is the whole tensor's)."""
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _groups(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Split a rank's pieces into files; a name stands once in a file."""
    groups: list[list[WriteItem]] = []
    names: set[str] = set()
    size = 0
    for item in items:
        if not groups or size >= FILE_BYTES or item.index.fqn in names:
            groups.append([])
            names, size = set(), 0
        groups[-1].append(item)
        names.add(item.index.fqn)
        size += _size(item)
    return groups


class SafetensorsReader(StorageReader):
    """Reads what `SafetensorsWriter` wrote, on any mesh."""

    def __init__(self, directory: Path, index: dict):
        self.directory = directory
        self.index = index
        self._files: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def read_metadata(self) -> Metadata:
        entries: dict[str, Any] = {}
        for name, entry in self.index["tensors"].items():
            chunks = []
            for number, offset, shape in entry["pieces"]:
                chunks.append(ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape)))
                self._files[MetadataIndex(name, offset)] = self.index["files"][number]
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, entry["dtype"])),
                size=torch.Size(entry["shape"]),
                chunks=chunks,
            )
        return Metadata(state_dict_metadata=entries, storage_data={}, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        requests: dict[str, list] = {}
        for item in plan.items:
            requests.setdefault(self._files[item.storage_index], []).append(item)

        def read_file(name: str) -> None:
            with safe_open(self.directory / name, framework="pt") as file:
                for item in requests[name]:
                    key = item.storage_index.fqn
                    if item.lengths:
                        ends = zip(item.storage_offsets, item.lengths, strict=True)
                        tensor = file.get_slice(key)[tuple(slice(start, start + length) for start, length in ends)]
                    else:
                        tensor = file.get_tensor(key)  # of no dimension: there is nothing to slice
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)

        with ThreadPoolExecutor(threads()) as pool:
            list(pool.map(read_file, requests))
        future: Future[None] = Future()
        future.set_result(None)
        return future
