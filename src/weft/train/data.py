"""From `data:` to batches: stores and datasets opened, joined, mixed, and measured against the run's length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from weft.config.components import load_class
from weft.config.data import DatasetSection, DatasetSource
from weft.config.derive import RunLength, derive, sequence_length
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.data.batches.layout import PLAIN, TOKEN_KEYS, Field, Layout
from weft.data.batches.loader import BatchSource, ValidationBatches
from weft.data.batches.mixture import ConcatDataset, MixtureOrder
from weft.data.batches.mixture_plan import MixturePlan, plan_mixture
from weft.data.batches.order import Order
from weft.data.batches.samples import Dataset, read_samples
from weft.data.sequences.length_warmup import LengthWarmup
from weft.data.sequences.packed import PackedDataset
from weft.data.sequences.placeholder import PlaceholderDataset
from weft.data.sequences.windows import StoreDataset
from weft.data.stores.store import StoreInfo, TokenStore
from weft.errors import UserError
from weft.evaluation.bits import BytesPerToken, bytes_per_token
from weft.mixing import BLOCK, find_empty_share, shortfall
from weft.observe.console import Console
from weft.parallel.stages import stages_of_rank
from weft.parallel.world import World


@dataclass(frozen=True)
class HeldOut:
    """One of the data sets that `data.validation` names.

    Attributes:
        name: among several; "" for the only one.
        whole, some: all of it, and as much as `validation.tokens` says.
        bytes_per_token: of a store that knows.
    """

    name: str
    whole: ValidationBatches
    some: ValidationBatches
    bytes_per_token: BytesPerToken | None


@dataclass(frozen=True)
class Data:
    """What is learned from and measured on, as functions of the step.

    Attributes:
        digests: of the stores: "train" or, for a mixture, "train/NAME"; "validation" or "validation/NAME".
        plan: what the run takes from each source of a mixture; None for one source.
    """

    length: RunLength
    source: BatchSource
    held_out: tuple[HeldOut, ...]
    digests: dict[str, str]
    plan: MixturePlan | None = None


def layout_of(objective: object, config: RunConfig) -> Layout:
    """What samples consist of, as the objective declares it.

    Raises:
        UserError: a field that is none, or has a name that every batch uses.
    """
    fields, sequences = getattr(objective, "fields", {}), getattr(objective, "sequences_per_sample", 1)
    name = type(objective).__name__
    if not isinstance(fields, Mapping) or not all(isinstance(field, Field) for field in fields.values()):
        raise UserError(f"objective: {name}.fields must map names to weft.objectives.Field")
    if taken := set(fields) & {*TOKEN_KEYS, "samples"}:
        raise UserError(f"objective: {name}.fields has {sorted(taken)[0]!r}, a part that every batch has; rename it")
    if not isinstance(sequences, int) or sequences < 1:
        raise UserError(f"objective: {name}.sequences_per_sample must be an integer of 1 or more, and is {sequences!r}")
    return Layout(dict(fields), sequences, getattr(config.model, "vocab_size", None))


def open_data(config: RunConfig, world: World, console: Console | None = None, layout: Layout = PLAIN) -> Data:
    """Open the stores (or the user's datasets) and work out the run's length.

    Args:
        layout: what samples consist of.

    Raises:
        UserError: a damaged store, sources that cannot feed the run, no sample.
    """
    train, digests = open_train(config, console, layout)
    _raise_if_other_length("data.train", train, config, world, layout)
    mixed = config.data.weighted
    sequences = len(train) * layout.sequences
    size = {} if mixed else {"train_tokens": sequences * sequence_length(config), "train_samples": sequences}
    length = in_samples(derive(config, **size, mesh=world.shape), layout.sequences, config, world)
    order, planned = None, None
    if isinstance(train, ConcatDataset):
        samples = length.steps * length.sequences_per_step // layout.sequences
        order = mixture_order(config, train, samples) if mixed else None
        planned = plan_mixture(config.data, train.sizes, length.sequence_length, samples)
    warmup = config.data.length_warmup
    source = BatchSource(
        train if needs_rows(train, config, world) else PlaceholderDataset(train, length.sequence_length),
        batch_size=length.sequences_per_step // layout.sequences,
        rank=world.data_rank,
        ranks=world.data_ranks,
        seed=config.run.seed if config.data.shuffle else None,
        order=order,
        length_warmup=warmup and LengthWarmup(length.sequence_length, warmup.start, warmup.steps),
        layout=layout,
    )
    held_out = []
    for name, chosen in config.data.held_out.items():
        dataset, info = open_source(chosen, config, console, layout)
        _raise_if_other_length("data.validation" + f".{name}" * bool(name), dataset, config, world, layout)
        batches = partial(
            ValidationBatches,
            dataset,
            batch_size=(config.validation.micro_batch_size or length.micro_batch_size // layout.sequences)
            * world.data_ranks,
            rank=world.data_rank,
            ranks=world.data_ranks,
            layout=layout,
        )
        most = config.validation.tokens
        most = most and max(1, most // length.sequence_length // layout.sequences)
        text = bytes_per_token(info.tokens, info.documents, info.bytes, info.eod_id) if info is not None else None
        held_out.append(HeldOut(name, batches(), batches(limit=most), text))
        digests |= {"validation" + f"/{name}" * bool(name): info.digest} if info is not None else {}
    return Data(length, source, tuple(held_out), digests, planned)


def in_samples(length: RunLength, sequences: int, config: RunConfig, world: World) -> RunLength:
    """The same run in whole samples of so many sequences: a micro-batch of `n` holds `n` samples.

    Raises:
        UserError: a step of no whole number of samples, or one that the pipeline's schedule cannot order.
    """
    if sequences == 1:
        return length
    if length.sequences_per_step % sequences:
        raise UserError(
            f"training.batch_tokens: a step's {length.sequences_per_step} sequences are no whole number of samples, "
            f"which have {sequences} each; set a multiple of {sequences * length.sequence_length}"
        )
    samples = math.ceil(length.sequences_per_step // sequences / world.shape.data_ranks)
    micro = config.training.micro_batch_size or max(1, length.micro_batch_size // sequences)
    count = math.ceil(samples / min(micro, samples))
    if world.shape.pp > 1 and not config.parallel.orders(count, world.shape.pp):
        raise UserError(
            f"training.micro_batch_size: a rank's {samples} samples a step are {count} micro-batches, which "
            f"{config.parallel.pp_schedule} cannot order over {world.shape.pp} ranks; set another"
        )
    return replace(
        length,
        rows_per_rank=samples * sequences,
        micro_batch_size=min(micro, samples) * sequences,
        accumulation=count,
    )


def needs_rows(train: Dataset, config: RunConfig, world: World) -> bool:
    """Whether this rank has a use for what is in the rows of a step.

    In a pipeline the first stage has one for tokens, the last for labels, and all of them where attention keeps
    documents apart or experts are balanced by how much a row counts.
    """
    parts = train.datasets if isinstance(train, ConcatDataset) else [train]
    plain = all(isinstance(part, StoreDataset) for part in parts) and not config.data.document_attention
    if world.shape.pp == 1 or not plain or not isinstance(config.model, ModelSection) or config.model.moe is not None:
        return True
    stages = stages_of_rank(config.parallel, world.place("pp"), world.shape.pp)
    return 0 in stages or world.shape.pp * config.parallel.virtual_stages - 1 in stages


def _raise_if_other_length(key: str, dataset: Dataset, config: RunConfig, world: World, layout: Layout) -> None:
    """Where rows are cut over ranks, samples of the user's own must be what `data.sequence_length` says they are."""
    if world.shape.cp * world.shape.tp == 1 or not len(dataset):
        return
    for part in dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]:
        if not getattr(part, "complete", False):
            found = read_samples(part, np.zeros(1, np.int64), layout)["tokens"].shape[-1]
            expected = config.data.sequence_length
            if found != expected:
                raise UserError(
                    f"{key}: {type(part).__name__}'s samples have {found} tokens, and rows of data.sequence_length "
                    f"{expected} are cut over the ranks of parallel.cp and tp; set data.sequence_length: {found}"
                )


def open_train(
    config: RunConfig, console: Console | None = None, layout: Layout = PLAIN
) -> tuple[Dataset, dict[str, str]]:
    """What is learned from, several sources joined; and the digests of the stores."""
    chosen = config.data.train
    if not isinstance(chosen, list):
        dataset, info = open_source(chosen, config, console, layout)
        return dataset, {"train": info.digest} if info else {}
    sources = config.data.sources
    opened = [
        open_source(source if isinstance(source, DatasetSource) else source.store, config, console, layout)
        for source in sources
    ]
    names = [source.label for source in sources]
    digests = {f"train/{name}": info.digest for name, (_, info) in zip(names, opened, strict=True) if info}
    return ConcatDataset(names, [dataset for dataset, _ in opened], layout), digests


def open_source(
    chosen: str | DatasetSection, config: RunConfig, console: Console | None = None, layout: Layout = PLAIN
) -> tuple[Dataset, StoreInfo | None]:
    """A token store's sequences, packed as `data.packing` says, or a dataset of the user's own."""
    if isinstance(chosen, DatasetSection):
        return load_class(chosen, "dataset")(**chosen.arguments), None
    if layout.fields or layout.sequences > 1:
        lacks = (
            f"the field {next(iter(layout.fields))!r}" if layout.fields else f"samples of {layout.sequences} sequences"
        )
        raise UserError(
            f"the objective {config.objective.type} asks for {lacks}, and a token store has none; name a dataset of "
            "your own",
            chosen,
        )
    store, data, length = TokenStore(chosen), config.data, sequence_length(config)
    if data.packing == "best_fit":
        return PackedDataset(store, length, console=console), store.info
    return StoreDataset(store, length, document_attention=data.document_attention), store.info


def mixture_order(config: RunConfig, train: ConcatDataset, samples: int) -> Order:
    """The order of a weighted mixture.

    Raises:
        UserError: a share too small to be heard, or limits that a run of `samples` sequences passes.
    """
    data, length = config.data, sequence_length(config)
    quiet = find_empty_share(data.stages(train.sizes, length), data.mixture_block or BLOCK)
    if quiet is not None:
        raise UserError(f"data.train: {train.names[quiet[1]]} has {quiet[2]}")
    found = data.phases(train.sizes, length)
    what = shortfall(found, samples, length)
    if what is not None:
        raise UserError(f"data.train: {what}")
    return MixtureOrder(train, found, seed=config.run.seed, shuffle=data.shuffle)
