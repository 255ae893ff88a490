"""From `data:` to batches: stores and datasets opened, joined, mixed, and measured against the run's length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from weft.config.components import load_class
from weft.config.data import DatasetSection, DatasetSource
from weft.config.derive import RunLength, derive
from weft.config.errors import UserError
from weft.config.mixture import (
    BLOCK,
    Plan,
    phases_of,
    plan,
    shortfall,
    sources_of,
    stages_of,
    unheard,
    unknown_tokenizers,
    weighted,
)
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.stages import stages_of_rank
from weft.data.batches.batch import Dataset, read_samples
from weft.data.batches.loader import BatchSource, ValidationBatches
from weft.data.batches.mixture import Joined, MixtureOrder
from weft.data.batches.order import Order
from weft.data.sequences.length_warmup import LengthWarmup
from weft.data.sequences.packed import PackedDataset
from weft.data.sequences.unread import UnreadDataset
from weft.data.sequences.windows import StoreDataset
from weft.data.stores.store import StoreInfo, TokenStore
from weft.evaluate.bits import BytesPerToken, bytes_per_token
from weft.observe.console import Console
from weft.parallel.world import World


@dataclass(frozen=True)
class Data:
    """What is learned from and measured on, as functions of the step.

    Attributes:
        digests: of the stores: "train" or, for a mixture, "train/NAME"; "validation".
        plan: what the run takes from each source of a mixture; None for one source.
    """

    length: RunLength
    source: BatchSource
    held_out: Callable[[bool], ValidationBatches] | None
    bytes_per_token: BytesPerToken | None
    digests: dict[str, str]
    plan: Plan | None = None


def open_data(config: RunConfig, world: World, console: Console | None = None) -> Data:
    """Open the stores (or the user's datasets) and work out the run's length.

    Raises:
        UserError: a damaged store, sources that cannot feed the run, no sample.
    """
    train, digests = open_train(config, console)
    _raise_if_other_length("data.train", train, config, world)
    doubt = unknown_tokenizers(config.data)
    if doubt is not None and console is not None:
        console.warning(doubt)
    mixed = weighted(config.data)
    tokens = len(train) * config.data.sequence_length
    size = {} if mixed else {"train_tokens": tokens, "train_samples": len(train)}
    length = derive(config, **size, mesh=world.shape)
    order, planned = None, None
    if isinstance(train, Joined):
        samples = length.steps * length.sequences_per_step
        order = mixture_order(config, train, samples) if mixed else None
        planned = plan(config.data, train.sizes, length.sequence_length, samples)
    warmup = config.data.length_warmup
    source = BatchSource(
        train if needs_rows(train, config, world) else UnreadDataset(train, length.sequence_length),
        rows=length.sequences_per_step,
        rank=world.data_rank,
        ranks=world.data_ranks,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        order=order,
        length_warmup=warmup and LengthWarmup(length.sequence_length, warmup.start, warmup.steps),
    )
    if config.data.validation is None:
        return Data(length, source, None, None, digests, planned)
    held_out, held_info = open_source(config.data.validation, config, console)
    _raise_if_other_length("data.validation", held_out, config, world)
    limit = config.validation.tokens and max(1, config.validation.tokens // config.data.sequence_length)
    batches = partial(
        ValidationBatches,
        held_out,
        rows=(config.validation.micro_batch_size or length.micro_batch_size) * world.data_ranks,
        rank=world.data_rank,
        ranks=world.data_ranks,
    )
    if held_info:
        digests["validation"] = held_info.digest
    text = None
    if held_info is not None:
        text = bytes_per_token(held_info.tokens, held_info.documents, held_info.bytes, held_info.eod_id)
    return Data(length, source, lambda whole: batches(limit=None if whole else limit), text, digests, planned)


def needs_rows(train: Dataset, config: RunConfig, world: World) -> bool:
    """Whether this rank has a use for what is in the rows of a step.

    In a pipeline the first stage has one for tokens, the last for labels, and all of them where attention keeps
    documents apart or experts are balanced by how much a row counts.
    """
    parts = train.datasets if isinstance(train, Joined) else [train]
    plain = all(isinstance(part, StoreDataset) for part in parts) and not config.data.document_attention
    if world.shape.pp == 1 or not plain or not isinstance(config.model, ModelSection) or config.model.moe is not None:
        return True
    stages = stages_of_rank(config.parallel, world.place("pp"), world.shape.pp)
    return 0 in stages or world.shape.pp * config.parallel.virtual_stages - 1 in stages


def _raise_if_other_length(key: str, dataset: Dataset, config: RunConfig, world: World) -> None:
    """Where rows are cut over ranks, samples of the user's own must be what `data.sequence_length` says they are."""
    if world.shape.cp * world.shape.tp == 1 or not len(dataset):
        return
    for part in dataset.datasets if isinstance(dataset, Joined) else [dataset]:
        if not getattr(part, "complete", False):
            found, expected = read_samples(part, np.zeros(1, np.int64))["tokens"].shape[1], config.data.sequence_length
            if found != expected:
                raise UserError(
                    f"{key}: {type(part).__name__}'s samples have {found} tokens, and rows of data.sequence_length "
                    f"{expected} are cut over the ranks of parallel.cp and tp; set data.sequence_length: {found}"
                )


def open_train(config: RunConfig, console: Console | None = None) -> tuple[Dataset, dict[str, str]]:
    """What is learned from, several sources joined; and the digests of the stores."""
    sources = sources_of(config.data)
    if not sources:
        dataset, info = open_source(config.data.train, config, console)
        return dataset, {"train": info.digest} if info else {}
    opened = [
        open_source(source if isinstance(source, DatasetSource) else source.store, config, console)
        for source in sources
    ]
    names = [source.label for source in sources]
    digests = {f"train/{name}": info.digest for name, (_, info) in zip(names, opened, strict=True) if info}
    return Joined(names, [dataset for dataset, _ in opened]), digests


def open_source(
    chosen: str | DatasetSection, config: RunConfig, console: Console | None = None
) -> tuple[Dataset, StoreInfo | None]:
    """A token store's sequences, packed as `data.packing` says, or a dataset of the user's own."""
    if isinstance(chosen, DatasetSection):
        return load_class(chosen, "dataset")(**chosen.arguments), None
    store, data = TokenStore.open(chosen), config.data
    if data.packing == "best_fit":
        return PackedDataset(store, data.sequence_length, console=console), store.info
    return StoreDataset(store, data.sequence_length, document_attention=data.document_attention), store.info


def mixture_order(config: RunConfig, train: Joined, samples: int) -> Order:
    """The order of a weighted mixture.

    Raises:
        UserError: a share too small to be heard, or limits that a run of `samples` sequences passes.
    """
    data, length = config.data, config.data.sequence_length
    quiet = unheard(stages_of(data, train.sizes, length), data.mixture_block or BLOCK)
    if quiet is not None:
        raise UserError(f"data.train: {train.names[quiet[1]]} has {quiet[2]}")
    found = phases_of(data, train.sizes, length)
    what = shortfall(found, samples, length)
    if what is not None:
        raise UserError(f"data.train: {what}")
    return MixtureOrder(train, found, seed=config.run.seed, shuffle=data.shuffle)
