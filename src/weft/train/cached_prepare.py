"""Computes what `Objective.prepare` returns for each sample once, before training, and caches it."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.config.derive import RunLength
from weft.data.batches.layout import Field, Layout
from weft.data.batches.loader import BatchSource, ValidationBatches
from weft.data.batches.mixture import ConcatDataset
from weft.data.batches.samples import Dataset, read_samples
from weft.data.sequences.packed import PackedDataset
from weft.data.sequences.placeholder import PlaceholderDataset
from weft.data.sequences.windows import StoreDataset
from weft.files import publish
from weft.formatting import counted
from weft.observe.status import LONG, alive, doing
from weft.parallel.passes import Passes
from weft.parallel.ranks import all_gather_object, error_on_all_ranks
from weft.train.cache_entries import entry_path, read_or_lock, unwritable
from weft.train.data import Data
from weft.train.frozen_sources import FrozenModels
from weft.train.job import Job

NAMES = "names.json"  # the list of the names of the values in a folder
VERSION = 2  # increased if the same models and stores give other values


class WithFields:
    """A dataset whose samples also have memory-mapped fields.

    Args:
        fields: name -> value of each sample, `[samples, seq, ...]`.
        layout: the layout of the samples without these fields.
    """

    complete = True

    def __init__(self, dataset: Dataset, fields: Mapping[str, np.ndarray], layout: Layout):
        self.dataset, self.fields, self.layout = dataset, dict(fields), layout

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: array[0] for key, array in self.read(np.array([index])).items()}

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns samples, stacked `[n, seq, ...]`."""
        found = {name: np.stack([array[index] for index in indices]) for name, array in self.fields.items()}
        return read_samples(self.dataset, indices, self.layout) | found

    def where(self, index: int) -> str:
        """Describes the origin of a sample, for messages."""
        return self.dataset.where(index)  # type: ignore[attr-defined]


def cache_prepared(job: Job, data: Data, frozen: FrozenModels, passes: Passes) -> None:
    """Adds what `prepare` returns to the samples of a run, if the objective has `cache_prepare`.

    The values of a token store are read from the user's cache folder, or computed by all ranks and written there. The
    frozen models are freed afterwards, and `prepare` is not called again, unless the objective has `prepare_frozen`,
    whose results are then cached instead. Every rank must call it, before any step.

    Args:
        passes: the passes of the trained model.

    Raises:
        UserError: the data are not token stores, or the cache cannot be written or read.
    """
    if not getattr(passes.objective, "cache_prepare", None):
        return
    if not isinstance(data.source, BatchSource):
        raise error_on_all_ranks("objective: batches that a program passes cannot be cached; turn caching off")
    if data.source.length_warmup is not None:
        raise error_on_all_ranks("data.length_warmup: shorter sequences have no cached values; remove this key")
    layout = data.source.layout
    known: dict[int, WithFields] = {}

    def wrap(dataset: Dataset) -> WithFields:
        if id(dataset) not in known:
            path = _path(job, dataset, frozen, passes.objective, layout)
            with ExitStack() as lock:
                found = read_or_lock(job, path, lambda: _read(path, len(dataset)), lock)
                if found is None:
                    if not passes.frozen:
                        passes.frozen = {name: model.make() for name, model in frozen.prepared.items()}
                    _compute(job, data, dataset, path, passes, layout)
                    found = _read(path, len(dataset))
            if found is None:
                raise error_on_all_ranks(f"{path}: not found on all hosts; set WEFT_CACHE to a folder that they share")
            known[id(dataset)] = WithFields(dataset, found, layout)
        return known[id(dataset)]

    for source in (data.source, *(batches for one in data.held_out for batches in (one.full, one.subset))):
        _add_fields(source, wrap)
    passes.stop_preparing()
    gc.collect()
    if job.world.device.type == "cuda":
        torch.cuda.empty_cache()


def _add_fields(source: BatchSource | ValidationBatches, wrap: Callable[[Dataset], WithFields]) -> None:
    """Replaces the datasets of a source of batches, and declares their fields."""
    dataset = source.dataset
    if isinstance(dataset, PlaceholderDataset):  # of a pipeline stage that needs no tokens
        dataset = dataset.dataset
    wrapped: list[Any] = [wrap(one) for one in (dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset])]
    declared = {name: Field(seq_dim=0, dtype=str(array.dtype)) for name, array in wrapped[0].fields.items()}
    source.layout = replace(source.layout, fields={**source.layout.fields, **declared})
    if isinstance(dataset, ConcatDataset):
        dataset.datasets, dataset.layout, source.dataset = wrapped, source.layout, dataset
    else:
        source.dataset = wrapped[0]


def _path(job: Job, dataset: Dataset, frozen: FrozenModels, objective: Any, layout: Layout) -> Path:
    """Returns the folder with the cached values of a dataset, which may not exist."""
    if not isinstance(dataset, PackedDataset | StoreDataset):
        name = type(dataset).__name__
        raise error_on_all_ranks(
            f"objective: only samples of token stores can be cached, but the data have a {name}; turn caching off"
        )
    models = {name: model.identity for name, model in frozen.prepared.items()}
    made = f"{type(objective).__module__}:{type(objective).__qualname__}"
    content = [VERSION, models, made, objective.cache_prepare, layout.vocab_size]
    return entry_path("prepared", job.config, dataset, content)


def _read(path: Path, samples: int) -> dict[str, np.ndarray] | None:
    """Returns `_open` of a folder; None if a rank does not find the values of all samples."""
    found = _open(path, samples)
    return found if all(all_gather_object(found is not None)) else None


def _open(path: Path, samples: int) -> dict[str, np.ndarray] | None:
    """Returns the memory-mapped values in a folder; None if it lacks a file, or the values of a sample."""
    found: dict[str, np.ndarray] = {}
    with suppress(OSError, ValueError, EOFError):
        names = json.loads((path / NAMES).read_bytes())
        found = {name: np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    return found if found and all(len(array) == samples for array in found.values()) else None


def _compute(job: Job, data: Data, dataset: Any, path: Path, passes: Passes, layout: Layout) -> None:
    """Computes the values of all samples of a dataset, and writes them to the folder `path`. Rank 0 writes."""
    world, size = job.world, data.length.micro_batch_size if isinstance(data.length, RunLength) else 1
    ranks = {"rank": world.data_rank, "ranks": world.data_ranks}
    batches = ValidationBatches(dataset, batch_size=size * world.data_ranks, layout=layout, **ranks)
    what = f"{', '.join(passes.frozen)} of {dataset.store.path}"
    doing(f"computing {what}", "cache", LONG)
    job.console.line(f"computing {what}: {counted(len(dataset), 'sequence')}, once for all runs with this model")
    passes.after_update()
    with (
        _Writer(path, len(dataset)) as writer,
        job.console.progress(batches.total, "computing", unit="sequence") as bar,
    ):
        for number, read in enumerate(batches, start=1):
            alive()
            rows = {name: values[read.samples >= 0].cpu().numpy() for name, values in passes.prepare_full(read).items()}
            own = (int(read.samples[0]), rows) if world.first_of_data_rank and len(read.samples) else None
            parts = [part for part in all_gather_object(own) if part is not None]
            world.agree(lambda parts=parts: writer.append(parts), only_first=True)
            bar.update(min(number * batches.batch_size, batches.total))
        world.agree(writer.finish, only_first=True)


class _Writer:
    """Writes arrays of samples to a new folder, which gets its name only when all samples are written.

    Args:
        path: the folder.
        samples: number of samples.
    """

    def __init__(self, path: Path, samples: int):
        self.path, self.samples = path, samples
        self.part = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        self.files: dict[str, Any] = {}

    def append(self, parts: list[tuple[int, dict[str, np.ndarray]]]) -> None:
        """Appends the values of the next samples: pairs of the first sample's index, and name -> `[n, seq, ...]`."""
        try:
            for _, rows in sorted(parts, key=lambda part: part[0]):
                for name, values in rows.items():
                    if len(values) and name not in self.files:
                        self.part.mkdir(parents=True, exist_ok=True)
                        self.files[name] = (self.part / f"{name}.npy").open("wb")
                        header = {"descr": values.dtype.str, "fortran_order": False}
                        shape = {"shape": (self.samples, *values.shape[1:])}
                        np.lib.format.write_array_header_1_0(self.files[name], header | shape)
                    if len(values):
                        self.files[name].write(np.ascontiguousarray(values).data)
        except OSError as error:
            raise unwritable(error, self.path) from None

    def finish(self) -> None:
        """Gives the folder its name, in place of a damaged folder. A folder that another run has published stays."""
        try:
            for file in self.files.values():
                file.close()
            (self.part / NAMES).write_text(json.dumps(sorted(self.files)))
            damaged = os.path.lexists(self.path) and _open(self.path, self.samples) is None
            publish(self.part, self.path, replace=damaged)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise unwritable(error, self.path) from None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()
        shutil.rmtree(self.part, ignore_errors=True)
