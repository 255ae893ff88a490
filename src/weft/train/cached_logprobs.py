"""Computes the log-probabilities that a frozen model gives to documents once, before training, and caches them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from weft.config.derive import RunLength
from weft.data.batches.layout import Layout
from weft.data.batches.loader import BatchSource, ValidationBatches
from weft.data.batches.mixture import ConcatDataset
from weft.data.sequences.packed import PackedDataset
from weft.files import new_file
from weft.formatting import counted
from weft.observe.status import LONG, alive, doing
from weft.parallel.objective import Objective
from weft.parallel.passes import FrozenModel, Passes
from weft.parallel.ranks import broadcast_object, error_on_all_ranks
from weft.train.auto_settings import keep_freed_memory
from weft.train.cache_entries import entry_path, read_or_lock, unwritable
from weft.train.data import Data
from weft.train.frozen_sources import FrozenModels
from weft.train.job import Job

VERSION = 1  # increased if the same models and stores give other values


def fill_logprobs(job: Job, data: Data, frozen: FrozenModels, passes: Passes) -> None:
    """Sets the fields of `Objective.cached_logprobs` in the data of a run. Every rank must call it, before any step.

    The value of a document is the sum of the log-probabilities of its learned tokens. The values of a store are read
    from the user's cache folder, or computed by all ranks and written there. The frozen models are freed afterwards.

    Args:
        passes: the passes of the trained model.

    Raises:
        UserError: a log-probability is not finite, or the cache cannot be written.
    """
    for field, cached in frozen.cached.items():
        model: FrozenModel | None = None
        for dataset, layout in packed_datasets(data):
            path = entry_path("logprobs", job.config, dataset, [VERSION, cached.identity]).with_suffix(".npy")
            read = partial(_read_on_all, job, path, dataset.store.num_documents)
            with ExitStack() as lock:
                values = read_or_lock(job, path, read, lock)
                if values is None:
                    model = model or cached.make()
                    values = _compute(job, data, dataset, layout, model, passes, field)
                    job.world.agree(lambda path=path, values=values: _write(path, values), only_first=True)
            dataset.values[field][:] = values
        if model is not None:
            del model
            gc.collect()
            if job.world.device.type == "cuda":
                torch.cuda.empty_cache()


def packed_datasets(data: Data) -> Iterator[tuple[PackedDataset, Layout]]:
    """Yields the packed token stores of `data.train`, then those of `data.validation`, with the layout of samples."""
    sources = [data.source] if isinstance(data.source, BatchSource) else []
    for source in (*sources, *(one.full for one in data.held_out)):
        dataset = source.dataset
        for one in dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]:
            if isinstance(one, PackedDataset):
                yield one, source.layout


def _read_on_all(job: Job, path: Path, documents: int) -> np.ndarray | None:
    """Returns the values in a file, which rank 0 reads; None if there is no such file, or the file is damaged."""
    found: list[np.ndarray | None] = []
    job.world.agree(lambda: found.append(_read(path, documents)), only_first=True)
    return broadcast_object(found[0] if found else None)


def _read(path: Path, documents: int) -> np.ndarray | None:
    """Returns the values in a file; None if there is no such file, or the file is damaged."""
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return values if values.dtype == np.float64 and values.shape == (documents,) else None


def _write(path: Path, values: np.ndarray) -> None:
    try:
        with new_file(path, os.getpid()) as file:
            np.save(file, values, allow_pickle=False)
    except OSError as error:
        raise unwritable(error, path) from None


@torch.no_grad()
def _compute(
    job: Job, data: Data, dataset: PackedDataset, layout: Layout, model: FrozenModel, passes: Passes, field: str
) -> np.ndarray:
    """Returns the sum of the log-probabilities of the learned tokens of each document in a store, `[documents]`.

    Each data rank processes some of the sequences. Documents that no sequence has are 0.
    """
    keep_freed_memory()
    world, size = job.world, data.length.micro_batch_size if isinstance(data.length, RunLength) else 1
    rank = {"rank": world.data_rank, "ranks": world.data_ranks}
    batches = ValidationBatches(dataset, batch_size=size * world.data_ranks, layout=layout, **rank)
    total = torch.zeros(dataset.store.num_documents, dtype=torch.float64)
    what = f"{field} of {dataset.store.path}"
    doing(f"computing {what}", "logprobs", LONG)
    job.console.line(f"computing {what}: {counted(len(dataset), 'sequence')}, once for all runs with this model")
    passes.after_update()
    with passes.evaluating(), job.console.progress(len(batches), f"computing {field}", unit="batch") as bar:
        for number, read in enumerate(batches, start=1):
            alive()
            batch, shard = passes.shard(read, {})
            found = model.outputs(passes, Objective().inputs(shard), batch, shard)
            sums = shard.document_sums(found.to(torch.float64) * (shard.weight > 0)).cpu()
            for row, sample in enumerate(read.samples.tolist()):
                if sample >= 0:
                    documents = torch.from_numpy(dataset.documents(sample))
                    total[documents] = sums[row, : len(documents)]
            bar.update(number)
    if world.ranks > 1:
        total = (total if world.first_of_data_rank else torch.zeros_like(total)).to(world.device)
        dist.all_reduce(total)
    values = total.cpu().numpy()
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise error_on_all_ranks(
            f"{dataset.store.path}: {field} of document {first:,} is {values[first]}; check the frozen model, or set "
            "training.dtype: float32"
        )
    return values
