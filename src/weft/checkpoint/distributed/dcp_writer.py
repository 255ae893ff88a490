"""Writes checkpoints of torch.distributed.checkpoint (DCP) as its default `FileSystemWriter` writes them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from weft.checkpoint.save import first_failure, planning
from weft.checkpoint.tensor_file import Entry


def write_dcp(
    folder: Path,
    entries: Sequence[Entry],
    shapes: Mapping[str, tuple[int, ...]],
    on_bytes: Callable[[int], None],
    objects: Mapping[str, bytes] | None = None,
) -> None:
    """Writes `.metadata` and a `.distcp` file per entry. One entry at a time is in memory.

    Args:
        folder: an existing folder.
        entries: tensors, or slices of tensors. The slices of a tensor must cover it without overlap.
        shapes: name -> shape of the full tensor.
        on_bytes: function that receives the number of bytes written since its last call.
        objects: name -> bytes of saved objects that are not tensors.

    Raises:
        OSError: a file cannot be written.
    """
    # A file per entry, because the writer keeps all tensors of a file in memory; and one thread, because it ignores
    # the exceptions of further threads.
    writer = _Writer(folder, single_file_per_rank=False, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
    planner = _Planner(entries, shapes, on_bytes, objects or {})
    try:
        with planning():
            state_dict_saver.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise first_failure(error) from error


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the path, which is the hidden name of the folder


class _Planner(DefaultSavePlanner):
    """Plans to write entries, which are read when they are written; the state dict is ignored."""

    def __init__(
        self,
        entries: Sequence[Entry],
        shapes: Mapping[str, tuple[int, ...]],
        on_bytes: Callable[[int], None],
        objects: Mapping[str, bytes],
    ):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shapes, self.on_bytes, self.objects = shapes, on_bytes, objects
        self.entries = {(entry.name, _offsets(entry)): entry for entry in entries}

    def create_local_plan(self) -> SavePlan:
        items = [_item(entry, self.shapes[entry.name]) for entry in self.entries.values()]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.objects]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.objects[index.fqn])
        assert index.offset is not None
        entry = self.entries[index.fqn, tuple(index.offset)]
        found = entry.read()
        tensor = found if isinstance(found, torch.Tensor) else torch.cat(list(found))
        assert tuple(tensor.shape) == entry.shape, (entry.name, tensor.shape, entry.shape)
        self.on_bytes(entry.bytes)
        return tensor.detach().to("cpu", entry.dtype).contiguous()


def _offsets(entry: Entry) -> tuple[int, ...]:
    return entry.offsets or (0,) * len(entry.shape)


def _item(entry: Entry, shape: tuple[int, ...]) -> WriteItem:
    offsets, sizes = torch.Size(_offsets(entry)), torch.Size(entry.shape)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=TensorProperties(dtype=entry.dtype),
        size=torch.Size(shape),
    )
    kind = WriteItemType.TENSOR if entry.shape == shape else WriteItemType.SHARD
    return WriteItem(MetadataIndex(entry.name, offsets), kind, tensor_data=data)
