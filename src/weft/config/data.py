"""`data:` the training and validation data, mixture weights and sequence layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen
from pydantic import Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer

from weft.config.section import Component, Folder, Section
from weft.mixing import BLOCK, Phase, Stage, decimal_fraction, phases, temperature_weights


class DatasetSection(Component):
    """A custom dataset in place of a token store. The keys of `{type: module:Class, ...}` are the arguments of the
    class.

    The class has `__len__` and `__getitem__(i) -> {"tokens": int array [seq], ...}` (docs/own-components.md).
    """

    kind: ClassVar[str] = "dataset"

    type: str
    """The class of the dataset, as `module:Class`."""


class _WithoutNulls(Section):
    @model_serializer(mode="wrap")
    def _without_nulls(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value is not None}


class StoreSource(_WithoutNulls):
    """A source of a mixture: a token store, or a custom dataset if `type: module:Class` is set in place of `store`.

    A string is short for `{store: string}`.
    """

    store: Folder
    """The token store."""
    weight: float | None = Field(None, ge=0)
    """Weight of the source. The source's share of the sequences is this weight divided by the sum of all weights. Set
    it for all sources or for none. Default: the number of sequences in the source (see `temperature`).
    """
    max_epochs: float | None = Field(None, gt=0)
    """Maximum number of passes over the source. After these passes, the other sources take over the source's share, in
    proportion to their weights. Default: no limit.
    """
    name: str | None = None
    """Name of the source in the curriculum and in reports. Default: the name of the folder or of the class."""

    @property
    def label(self) -> str:
        """The name of the source in the curriculum and in reports. The shuffled order of the source depends on this
        name.
        """
        return self.name or os.path.basename(os.path.normpath(self.store))


class DatasetSource(DatasetSection):
    """A custom dataset in a mixture: `{type: module:Class, weight: ..., ...}` with the arguments of the class."""

    weight: float | None = Field(None, ge=0)
    max_epochs: float | None = Field(None, gt=0)
    name: str | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = DatasetSource.model_fields
        return {key: value for key, value in write(self).items() if value is not None or key not in fields}

    @property
    def label(self) -> str:
        """The name of the source in the curriculum and in reports. The shuffled order of the source depends on this
        name.
        """
        return self.name or self.type.rpartition(":")[2]


def _source_tag(source: Any) -> str:
    is_dataset = isinstance(source, DatasetSource) or (isinstance(source, dict) and "type" in source)
    return "a dataset" if is_dataset else "a store"


Source = Annotated[
    Annotated[StoreSource, Tag("a store")] | Annotated[DatasetSource, Tag("a dataset")], Discriminator(_source_tag)
]


def held_out_sets(validation: Any) -> dict[str, Any]:
    """Returns the held-out sets of `data.validation` by name; a single set has the name "".

    A mapping with a `type` is a single dataset, so "type" cannot be the name of a set.
    """
    if isinstance(validation, dict) and "type" not in validation:
        return validation
    return {} if validation is None else {"": validation}


def _held_out_tag(held_out: Any) -> str:
    if held_out is held_out_sets(held_out):
        return "several by name"
    return "a dataset" if isinstance(held_out, dict | DatasetSection) else "a store"


HeldOut = Annotated[
    Annotated[Folder, Tag("a store")]
    | Annotated[DatasetSection, Tag("a dataset")]
    | Annotated[dict[str, Folder | DatasetSection], MinLen(1), Tag("several by name")],
    Discriminator(_held_out_tag),
]


class StageSection(_WithoutNulls):
    """A stage of a curriculum: mixture weights for a number of tokens."""

    tokens: int | None = Field(None, ge=1)
    """Length of the stage in tokens, rounded up to complete sequences. The last stage ignores this key: it
    lasts until the end of the run.
    """
    weights: dict[str, Annotated[float, Ge(0)]]
    """Weight of each source by name, relative to the other weights; a source that is not named has weight 0."""


class LengthWarmupSection(Section):
    """Sequence length warm-up: training starts with short sequences, whose length doubles until it is
    `sequence_length`.

    A target length grows linearly from `start` to `sequence_length` over the first `steps` steps. In each step, all
    sequences have the length `start * 2**k`, with the largest k for which this length does not exceed the target. These
    sequences are pieces of full sequences, so the number of tokens in a batch does not change.
    """

    start: int = Field(ge=1)
    """Initial sequence length in tokens, which must be `sequence_length` divided by a power of two."""
    steps: int = Field(ge=1)
    """Number of steps until sequences have their full length."""


class DataSection(Section):
    """Token stores (directories that `weft data pack` writes), and how batches are made from them."""

    train: Folder | DatasetSection | Annotated[list[Source], MinLen(1)]
    """Training data: a token store, a custom dataset `{type: module:Class, ...}`, or a list of these, which is a
    mixture.
    """
    validation: HeldOut | None = None
    """Held-out data: a token store, a custom dataset, or several of these, each with a name, such as `{code:
    stores/code, prose: stores/prose}`. Default: no validation.
    """
    sequence_length: int | None = Field(None, ge=1)
    """Number of tokens per sequence. Default: the smaller of 1024 and `model.max_position_embeddings`."""
    shuffle: bool = True
    """Whether sequences are shuffled anew in each epoch, with `run.seed` as seed."""
    workers: int = Field(0, ge=0)
    """Number of data loader processes per rank; with 0, the training process loads the data."""
    temperature: float | None = Field(None, gt=0)
    """Sampling temperature of a mixture without weights: the weight of each source is n^(1 / temperature), where n is
    the number of sequences in the source. Default: 1.
    """
    curriculum: Annotated[list[StageSection], MinLen(1)] | None = None
    """Stages of the run with different mixture weights. Default: constant weights."""
    mixture_block: int | None = Field(None, ge=1, le=1_000_000)
    """Number of sequences in a block of the mixture. In each block, every source has its share of the sequences,
    rounded to an integer. Default: 10,000.
    """
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """Method that forms sequences from documents. `concatenate`: documents end to end, split at any token. `best_fit`:
    complete documents, packed with little padding; only documents longer than a sequence are split.
    """
    document_attention: bool = False
    """Whether each token attends only to tokens of its own document, and positions start from 0 in each document.
    `packing: best_fit` implies it.
    """
    length_warmup: LengthWarmupSection | None = None
    """Settings of a sequence length warm-up. Default: all sequences have the full length."""

    @property
    def sources(self) -> list[StoreSource | DatasetSource]:
        """The sources of the mixture in `train`; empty if `train` is a single store or dataset."""
        return list(self.train) if isinstance(self.train, list) else []

    @property
    def weighted(self) -> bool:
        """Whether the sources are a weighted mixture. If not, every sequence of the sources is read once per epoch."""
        given = any(source.weight is not None or source.max_epochs is not None for source in self.sources)
        return bool(self.sources) and bool(self.curriculum or self.temperature not in (None, 1.0) or given)

    def stages(self, sizes: Sequence[int], length: int) -> list[Stage]:
        """Returns the stages of a weighted mixture.

        Args:
            sizes: number of sequences of each source, from which the weights follow if none are set.
            length: number of tokens per sequence. The length of a stage is rounded up to a multiple of it.
        """
        if not self.curriculum:
            if all(source.weight is None for source in self.sources):
                return [Stage(temperature_weights(sizes, self.temperature or 1.0))]
            return [Stage(tuple(decimal_fraction(source.weight or 0.0) for source in self.sources))]
        stages = []
        for number, stage in enumerate(self.curriculum):
            last = number == len(self.curriculum) - 1
            samples = None if last or stage.tokens is None else -(-stage.tokens // length)
            weights = (decimal_fraction(stage.weights.get(source.label, 0.0)) for source in self.sources)
            stages.append(Stage(tuple(weights), samples))
        return stages

    def phases(self, sizes: Sequence[int], length: int) -> list[Phase]:
        """Returns the phases of a weighted mixture: ranges of samples that consist of equal blocks (`weft.mixing`).

        The arguments are the same as for `stages`.
        """
        limits = [
            None if source.max_epochs is None else int(decimal_fraction(source.max_epochs) * size)
            for source, size in zip(self.sources, sizes, strict=True)
        ]
        return phases(self.stages(sizes, length), limits, self.mixture_block or BLOCK)

    @property
    def held_out(self) -> dict[str, str | DatasetSection]:
        """The sets of `validation` by name; a single set has the name ""."""
        return held_out_sets(self.validation)

    @property
    def stores(self) -> dict[str, str]:
        """The paths of the token stores for training, by dotted configuration key."""
        if isinstance(self.train, str):
            return {"data.train": self.train}
        stores = ((number, source) for number, source in enumerate(self.sources) if isinstance(source, StoreSource))
        return {f"data.train[{number}].store": source.store for number, source in stores}

    @property
    def held_out_stores(self) -> dict[str, str]:
        """The paths of the token stores for validation, by dotted configuration key."""
        stores = ((name, store) for name, store in self.held_out.items() if isinstance(store, str))
        return {f"data.validation.{name}" if name else "data.validation": store for name, store in stores}
