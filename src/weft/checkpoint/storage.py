"""A storage backend for torch.distributed.checkpoint (DCP): safetensors files and a JSON index, without pickle.

DCP plans which rank writes which tensors, and reshards when it loads. This module defines only the files. DCP's
`hf_storage` reads the headers of all files on every rank, infers tensor shapes from them, and builds each file in
memory. This storage writes an index instead, and hashes the bytes while it writes them. The files have the same names
and headers as with `hf_storage`, so PyTorch's `HuggingFaceStorageReader` can read them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from weft.checkpoint.checkpoint_files import Digest, threads
from weft.checkpoint.tensor_file import Entry, dtype_name, split_by_size, write_safetensors

FILE_BYTES = 256 * 2**20  # maximum size of a file; several threads write and hash the files of a rank


@dataclass(frozen=True)
class Chunk:
    """A tensor in a file, or a rectangular slice of a tensor.

    Attributes:
        offsets: where the slice begins in the tensor, for each dimension.
        shape: shape of the slice.
    """

    tensor: str
    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def shard_names(rank: int, count: int) -> list[str]:
    """Returns the names of the `count` files of tensors that a rank writes."""
    return [f"shard-{rank + 1:05d}-model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]


def write_shard(path: Path, entries: Sequence[Entry], on_bytes: Callable[[int], None]) -> tuple[Digest, list[Chunk]]:
    """Writes one file of tensors, with a header as in DCP's `hf_storage`. Returns the file's digest and chunks."""
    chunks = [_chunk(path.name, entry) for entry in entries]
    offsets = {chunk.tensor: {"saved_offsets": chunk.offsets} for chunk in chunks}
    header = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    return write_safetensors(path, entries, header, on_bytes), chunks


def _chunk(file: str, entry: Entry) -> Chunk:
    return Chunk(entry.name, file, entry.offsets or (0,) * len(entry.shape), entry.shape)


def build_index(
    chunks: Sequence[Chunk], tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], tied: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the content of index.json, which lists the dtype, shape and chunks of each tensor.

    Args:
        tensors: name -> dtype and full shape.
        tied: further name of a tied weight -> the name under which the tensor is saved.
    """
    files = {name: number for number, name in enumerate(dict.fromkeys(chunk.file for chunk in chunks))}
    found: dict[str, list] = {name: [] for name in tensors}
    for chunk in chunks:
        found[chunk.tensor].append([files[chunk.file], list(chunk.offsets), list(chunk.shape)])
    entries = {
        name: {"dtype": dtype_name(dtype), "shape": list(shape), "pieces": sorted(found[name], key=lambda c: c[1])}
        for name, (dtype, shape) in sorted(tensors.items())
    }
    return {"format": "weft checkpoint", "version": 1, "files": list(files), "tied": dict(tied), "tensors": entries}


class SafetensorsWriter(StorageWriter):
    """A DCP writer that assigns each rank's tensors to files. `write` then writes the files of this rank.

    So DCP's collectives can be done before the training goes on, and the files can be written beside the training.

    Args:
        tied: further name of a tied weight -> the name under which the tensor is saved.
        hold: function that replaces each entry to write, for example by a copy of its tensor.

    Attributes:
        plan: what this rank writes.
        shards: name of each file of this rank -> its tensors.
        index: on rank 0, the content of index.json.
        bytes: the bytes of this rank's tensors.
    """

    def __init__(self, tied: dict[str, str], hold: Callable[[Entry], Entry] | None = None):
        self.tied, self.hold = tied, hold or (lambda entry: entry)
        self.plan = SavePlan([])
        self.shards: dict[str, list[Entry]] = {}
        self.index: dict[str, Any] = {}
        self.bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Sets `storage_data` of each plan to the plan's rank."""
        return [dataclasses.replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.plan = plan
        items = {(item.index.fqn, tuple(_data(item).chunk.offsets)): item for item in plan.items if _size(item)}
        groups = split_by_size([self.hold(_entry(item, planner)) for item in items.values()], FILE_BYTES)
        self.shards = dict(zip(shard_names(plan.storage_data, len(groups)), groups, strict=True))
        self.bytes = sum(entry.bytes for group in groups for entry in group)
        found = [_chunk(name, entry) for name, entries in self.shards.items() for entry in entries]
        chosen = [(items[chunk.tensor, chunk.offsets], chunk) for chunk in found]
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, _size(item), chunk) for item, chunk in chosen])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 builds the index of all tensors and their chunks."""
        tensors = {
            name: (entry.properties.dtype, entry.size)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.index = build_index([result.storage_data for rank in results for result in rank], tensors, self.tied)

    def write(self, directory: Path, workers: int, on_bytes: Callable[[int], None]) -> dict[str, Digest]:
        """Writes the files of this rank into an existing directory, and returns their digests by name.

        Args:
            workers: number of threads.
            on_bytes: function that receives the number of bytes written since its last call.
        """

        def write(name: str) -> Digest:
            return write_shard(directory / name, self.shards[name], on_bytes)[0]

        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(self.shards, pool.map(write, self.shards), strict=True))


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None  # only tensors are saved by DCP
    return item.tensor_data


def _entry(item: WriteItem, planner: SavePlanner) -> Entry:
    def read() -> torch.Tensor:
        found = planner.resolve_data(item)
        assert isinstance(found, torch.Tensor)
        return found

    data = _data(item)
    return Entry(item.index.fqn, data.properties.dtype, tuple(data.chunk.sizes), read, tuple(data.chunk.offsets))


def _size(item: WriteItem) -> int:
    """Returns the bytes of a planned chunk. (`item.tensor_storage_size()` returns the bytes of the full tensor.)"""
    return math.prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize


class SafetensorsReader(StorageReader):
    """A DCP reader: reads, on any mesh, the files that `SafetensorsWriter` wrote.

    Args:
        index: the content of index.json.
    """

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

    def needed(self, targets: dict[str, Any]) -> set[str]:
        """Returns the names of the files that this rank reads to fill `targets` (name -> tensor)."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, self.read_metadata())
        return {self._files[item.storage_index] for item in planner.create_local_plan().items}

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
                        tensor = file.get_tensor(key)  # a tensor without dimensions cannot be sliced
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)

        with ThreadPoolExecutor(threads()) as pool:
            list(pool.map(read_file, requests))
        future: Future[None] = Future()
        future.set_result(None)
        return future
