"""Opens the training and validation data of a config, and derives the length of the run from these data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np

from weft.config.data import DatasetSource
from weft.config.derive import (
    DEFAULT_MICRO_BATCH_TOKENS,
    Intervals,
    RunLength,
    derive,
    derive_intervals,
    sequence_length,
)
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.data.batches.batch import Batch
from weft.data.batches.layout import PLAIN, TOKEN_KEYS, Field, Layout
from weft.data.batches.loader import BatchSource, ValidationBatches
from weft.data.batches.mixture import ConcatDataset, MixtureOrder
from weft.data.batches.mixture_plan import MixturePlan, plan_mixture
from weft.data.batches.order import Order
from weft.data.batches.samples import Dataset, read_samples
from weft.data.sequences.length_warmup import LengthWarmup
from weft.data.sequences.placeholder import PlaceholderDataset
from weft.data.sequences.windows import StoreDataset
from weft.data.stores.store import StoreInfo
from weft.errors import UserError
from weft.evaluation.bits import BytesPerToken, bytes_per_token
from weft.mixing import BLOCK, find_empty_share, shortfall
from weft.observe.console import Console
from weft.parallel.objective import Objective
from weft.parallel.stages import stages_of_rank
from weft.parallel.world import World
from weft.train.frozen_sources import cached_fields
from weft.train.given_batches import GivenBatches
from weft.train.open_source import open_source
from weft.train.rollouts.source import RolloutSource


@dataclass(frozen=True)
class HeldOut:
    """One validation set of `data.validation`.

    Attributes:
        name: the name of the set; "" if `data.validation` is a single set.
        full: batches of the complete set.
        subset: batches of the set's first sequences, up to `validation.tokens` tokens in total.
        bytes_per_token: mean number of bytes of text per token; None if the store does not record the size of the text.
    """

    name: str
    full: ValidationBatches
    subset: ValidationBatches
    bytes_per_token: BytesPerToken | None


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        length: number and size of the steps, and how many steps pass between validations, checkpoints and samples.
        source: the training batches, as a function of the step (and of the model, if this generates the training data);
            or the batches that are passed to `Trainer.step`.
        held_out: the validation sets.
        digests: name -> digest of a token store. The names are "train" and "validation", or "train/NAME" and
            "validation/NAME".
        left_out: name of a token store, as in `digests` -> reason -> number of documents that were left out or changed
            when the store was packed. Stores without such documents are omitted.
        plan: number of samples that the run takes from each source of a mixture; None unless `data.train` is a list.
    """

    length: RunLength | Intervals
    source: BatchSource | GivenBatches | RolloutSource
    held_out: tuple[HeldOut, ...]
    digests: dict[str, str]
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    plan: MixturePlan | None = None

    @property
    def validates(self) -> bool:
        """Whether there are held-out data or prompts."""
        return bool(self.held_out) or (isinstance(self.source, RolloutSource) and self.source.held_out is not None)

    def micro_batch_size(self, batch: Batch) -> int:
        """Returns the number of sequences per forward pass, for this rank's sequences of a global batch."""
        if not isinstance(self.source, BatchSource):
            return self.source.micro_batch_size(batch)
        assert isinstance(self.length, RunLength)
        # Length warm-up splits each sequence into several sequences, so a micro-batch has as many times more.
        return self.length.micro_batch_size * max(1, len(batch.tokens) // self.length.sequences_per_rank)


def layout_of(objective: object, config: RunConfig) -> Layout:
    """Returns what the objective declares of samples: fields, sequences per sample, and how documents are weighed.

    Raises:
        UserError: `fields` or `sequences_per_sample` is invalid, or a field has the name of a built-in key of batches.
    """
    fields, sequences = getattr(objective, "fields", {}), getattr(objective, "sequences_per_sample", 1)
    computed = tuple(cached_fields(objective))
    name = type(objective).__name__
    if not isinstance(fields, Mapping) or not all(isinstance(field, Field) for field in fields.values()):
        raise UserError(f"objective: {name}.fields must map names to weft.objectives.Field")
    if taken := set(fields) & {*TOKEN_KEYS, "samples"}:
        raise UserError(f"objective: {name}.fields has {sorted(taken)[0]!r}, a built-in key of batches; rename it")
    if not isinstance(sequences, int) or sequences < 1:
        raise UserError(f"objective: {name}.sequences_per_sample must be an integer >= 1, but is {sequences!r}")
    kind = getattr(objective, "data", "text")
    if kind not in ("text", "preferences"):
        raise UserError(f'objective: {name}.data is {kind!r}; set "text" or "preferences"')
    weigh_documents = bool(getattr(objective, "weigh_documents", False))
    last_tokens = bool(getattr(objective, "last_tokens", False))
    # The size of noise, which token is a document's last, and what experts count depend on the number of tokens.
    routers = getattr(config.model, "moe", None) is not None
    separate = bool(getattr(objective, "embedding_noise", 0.0)) or last_tokens or routers
    fields = {**fields, **dict.fromkeys(computed, Field(dtype="float64", per_document=True))}
    positions, size = None, getattr(config.model, "vocab_size", None)
    if isinstance(config.model, ModelSection) and config.model.position == "learned":
        positions = config.model.max_position_embeddings
    return Layout(fields, sequences, size, weigh_documents, separate, kind, computed, last_tokens, positions)


def open_data(config: RunConfig, world: World, console: Console | None = None, layout: Layout = PLAIN) -> Data:
    """Opens the token stores and custom datasets, and derives the length of the run.

    Args:
        layout: result of `layout_of`; default: samples of tokens only.

    Raises:
        UserError: a store is damaged, the sources are too small for the run, the training data have no sample, or
            length warm-up would split documents that the objective needs complete.
    """
    # `config check` reads only literals in the source of the objective's class.
    if config.data.length_warmup is not None and layout.whole_documents:
        raise UserError(
            "data.length_warmup: a warm-up splits documents, but the objective needs complete answers; remove the key"
        )
    config = config.model_copy(update={"data": config.data.with_stores})
    train, stores = open_train(config, console, layout)
    _raise_if_wrong_length("data.train", train, config, world, layout)
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
        train if needs_sequences(train, config, world) else PlaceholderDataset(train, length.sequence_length),
        batch_size=length.sequences_per_step // layout.sequences,
        rank=world.data_rank,
        ranks=world.data_ranks,
        seed=config.run.seed if config.data.shuffle else None,
        order=order,
        length_warmup=warmup and LengthWarmup(length.sequence_length, warmup.start, warmup.steps),
        layout=layout,
    )
    held_out, more = open_held_out(config, world, console, layout, length.micro_batch_size)
    return Data(length, source, held_out, *facts_of(stores | more), planned)


def open_given(
    config: RunConfig, world: World, console: Console, objective: Objective, form: Literal["global", "local"]
) -> Data:
    """Returns the data of a run whose batches are passed to `Trainer.step`. Opens only the validation data.

    Args:
        form: whether each batch is a global batch or this data parallel rank's part of it.

    Raises:
        UserError: the validation data are not valid, or the config does not set the intervals that the run needs.
    """
    layout, length = layout_of(objective, config), sequence_length(config)
    source = GivenBatches(config, world, objective, layout, form)
    micro = config.training.micro_batch or max(1, DEFAULT_MICRO_BATCH_TOKENS // length // layout.sequences)
    held_out, stores = open_held_out(config, world, console, layout, micro * layout.sequences)
    return Data(derive_intervals(config), source, held_out, *facts_of(stores))


def facts_of(stores: Mapping[str, StoreInfo]) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Returns `Data.digests` and `Data.left_out` of token stores."""
    digests = {name: info.digest for name, info in stores.items()}
    return digests, {name: what for name, info in stores.items() if (what := info.rejected | info.notes)}


def open_held_out(
    config: RunConfig, world: World, console: Console | None, layout: Layout, micro_batch_size: int
) -> tuple[tuple[HeldOut, ...], dict[str, StoreInfo]]:
    """Opens the validation sets.

    Args:
        micro_batch_size: number of sequences per forward pass and rank, unless `validation.micro_batch_size` is set.

    Returns:
        The sets, and the content of `store.json` of each token store, by the names of `Data.digests`.
    """
    held_out, stores, length = [], {}, sequence_length(config)
    limit = config.validation.tokens
    limit = limit and max(1, limit // length // layout.sequences)
    for name, chosen in config.data.held_out.items():
        dataset, info = open_source(chosen, config, console, layout)
        _raise_if_wrong_length("data.validation" + f".{name}" * bool(name), dataset, config, world, layout)
        batches = partial(
            ValidationBatches,
            dataset,
            batch_size=(config.validation.micro_batch_size or micro_batch_size // layout.sequences) * world.data_ranks,
            rank=world.data_rank,
            ranks=world.data_ranks,
            layout=layout,
        )
        text = None
        # With pairs or values of documents, the loss is not a number of nats per token.
        if info is not None and info.kind != "preferences" and not layout.fields:
            text = bytes_per_token(info.tokens, info.documents, info.bytes, info.eod_id)
        held_out.append(HeldOut(name, batches(), batches(limit=limit), text))
        stores |= {"validation" + f"/{name}" * bool(name): info} if info is not None else {}
    return tuple(held_out), stores


def in_samples(length: RunLength, sequences: int, config: RunConfig, world: World) -> RunLength:
    """Returns `length` with batch sizes for an objective whose samples have several sequences.

    Each rank and each micro-batch gets complete samples. `training.micro_batch_size` is read as a number of samples.

    Args:
        sequences: number of sequences per sample.

    Raises:
        UserError: the number of sequences per step is not a multiple of `sequences`, or the pipeline schedule does not
            support the number of micro-batches.
    """
    if sequences == 1:
        return length
    if length.sequences_per_step % sequences:
        raise UserError(
            f"training.batch_tokens: the {length.sequences_per_step} sequences of a step are not a multiple of the "
            f"{sequences} sequences of a sample; set a multiple of {sequences * length.sequence_length} tokens"
        )
    samples = math.ceil(length.sequences_per_step // sequences / world.shape.data_ranks)
    micro = config.training.micro_batch or max(1, length.micro_batch_size // sequences)
    count = math.ceil(samples / min(micro, samples))
    if world.shape.pp > 1 and not config.parallel.supports(count, world.shape.pp):
        raise UserError(
            f"training.micro_batch_size: the {samples} samples per step and rank make {count} micro-batches, but "
            f"{config.parallel.pp_schedule} does not support this number on {world.shape.pp} ranks; set another size"
        )
    return replace(
        length,
        sequences_per_rank=samples * sequences,
        micro_batch_size=min(micro, samples) * sequences,
        accumulation=count,
    )


def needs_sequences(train: Dataset, config: RunConfig, world: World) -> bool:
    """Whether this rank needs the content of the sequences.

    In a pipeline, the first stage needs tokens, and the last stage needs labels. All stages need both if a dataset or
    the model is custom, if attention is limited to documents, or if the model has experts (the auxiliary losses depend
    on the weights of the tokens).
    """
    datasets = train.datasets if isinstance(train, ConcatDataset) else [train]
    plain = all(isinstance(one, StoreDataset) for one in datasets) and not config.data.document_attention
    if world.shape.pp == 1 or not plain or not isinstance(config.model, ModelSection) or config.model.moe is not None:
        return True
    stages = stages_of_rank(config.parallel, world.axis_rank("pp"), world.shape.pp)
    return 0 in stages or world.shape.pp * config.parallel.virtual_stages - 1 in stages


def _raise_if_wrong_length(key: str, dataset: Dataset, config: RunConfig, world: World, layout: Layout) -> None:
    """Raises UserError if `cp` or `tp` shards sequences, and a sample does not have `data.sequence_length` tokens.

    Checks only one sample of a custom dataset.

    Args:
        key: config key of the dataset, for the message.
    """
    if world.shape.cp * world.shape.tp == 1 or not len(dataset):
        return
    for one in dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]:
        if not getattr(one, "complete", False):
            found = read_samples(one, np.zeros(1, np.int64), layout)["tokens"].shape[-1]
            expected = config.data.sequence_length
            if found != expected:
                raise UserError(
                    f"{key}: {type(one).__name__}'s samples have {found} tokens, but parallel.cp and tp shard "
                    f"sequences of {expected} tokens; set data.sequence_length: {found}"
                )


def open_train(
    config: RunConfig, console: Console | None = None, layout: Layout = PLAIN
) -> tuple[Dataset, dict[str, StoreInfo]]:
    """Opens the training data.

    Returns:
        The dataset, which concatenates all sources; and the content of `store.json` of each token store, by the names
        of `Data.digests`.
    """
    chosen = config.data.train
    assert chosen is not None
    if not isinstance(chosen, list):
        dataset, info = open_source(chosen, config, console, layout)
        return dataset, {"train": info} if info else {}
    datasets, stores = {}, {}
    for source in config.data.sources:
        given = source if isinstance(source, DatasetSource) else source.store
        datasets[source.label], info = open_source(given, config, console, layout)
        stores |= {f"train/{source.label}": info} if info else {}
    return ConcatDataset(list(datasets), list(datasets.values()), layout), stores


def mixture_order(config: RunConfig, train: ConcatDataset, samples: int) -> Order:
    """Returns the order of the samples of a weighted mixture.

    Args:
        train: the sources of the mixture.
        samples: number of samples that the run takes.

    Raises:
        UserError: the weight of a source is too small to have an effect, or `samples` samples repeat a source more
            often than its `max_epochs` allows.
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
