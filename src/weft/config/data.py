"""`data:` what is read, in which shares, and how it is cut into sequences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen
from pydantic import Discriminator, Field, SerializerFunctionWrapHandler, Tag, model_serializer

from weft.config.section import Component, Folder, Section
from weft.mixing import BLOCK, Phase, Stage, decimal_fraction, phases, temperature_weights


class DatasetSection(Component):
    """A dataset of the user's own: `{type: module:Class, ...its arguments}`.

    The class has `__len__` and `__getitem__(i) -> {"tokens": int array [seq], ...}` (docs/own-components.md).
    """

    kind: ClassVar[str] = "dataset"


class _Source(Section):
    @model_serializer(mode="wrap")
    def _without_nulls(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value is not None}


class StoreSource(_Source):
    """A token store in a mixture. A text stands for `{store: text}`."""

    store: Folder = Field(description="the token store; instead of it, `type: module:Class` is a dataset of your own")
    weight: float | None = Field(
        None, ge=0, description="share of the sequences, relative to the others'; default, for all: by size"
    )
    max_epochs: float | None = Field(
        None, gt=0, description="passes over it at the most; then its share goes to the others"
    )
    name: str | None = Field(None, description="default: the folder's name, or the class's")

    @property
    def label(self) -> str:
        """What the source is called: in the curriculum, in the plan, and in the key of its order."""
        return self.name or os.path.basename(os.path.normpath(self.store))


class DatasetSource(DatasetSection):
    """A dataset of the user's own in a mixture: `{type: module:Class, weight: ..., ...its arguments}`."""

    weight: float | None = Field(None, ge=0)
    max_epochs: float | None = Field(None, gt=0)
    name: str | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        own = DatasetSource.model_fields
        return {key: value for key, value in write(self).items() if value is not None or key not in own}

    @property
    def label(self) -> str:
        """What the source is called."""
        return self.name or self.type.rpartition(":")[2]


def _kind_of_source(source: Any) -> str:
    return (
        "a dataset"
        if isinstance(source, DatasetSource) or (isinstance(source, dict) and "type" in source)
        else "a store"
    )


Source = Annotated[
    Annotated[StoreSource, Tag("a store")] | Annotated[DatasetSource, Tag("a dataset")], Discriminator(_kind_of_source)
]


def held_out_sets(validation: Any) -> dict[str, Any]:
    """`data.validation` by name; what stands there by itself has the name "". In a file, a dataset is a mapping with a
    `type`: no set can have that name."""
    if isinstance(validation, dict) and "type" not in validation:
        return validation
    return {} if validation is None else {"": validation}


def _kind_of_held_out(held_out: Any) -> str:
    if held_out is held_out_sets(held_out):
        return "several by name"
    return "a dataset" if isinstance(held_out, dict | DatasetSection) else "a store"


HeldOut = Annotated[
    Annotated[Folder, Tag("a store")]
    | Annotated[DatasetSection, Tag("a dataset")]
    | Annotated[dict[str, Folder | DatasetSection], MinLen(1), Tag("several by name")],
    Discriminator(_kind_of_held_out),
]


class StageSection(_Source):
    """Weights that hold for some tokens."""

    tokens: int | None = Field(
        None, ge=1, description="how long they hold, rounded up to whole sequences; the last stage's hold to the end"
    )
    weights: dict[str, Annotated[float, Ge(0)]] = Field(
        description="source's name -> its share, relative to the others'; 0 for those not named"
    )


class LengthWarmupSection(Section):
    """Short rows first: full sequences are cut into rows of `start` tokens, then of twice as many, up to the whole.

    The length aimed at grows linearly over the steps; rows have the longest of these lengths that is not above it. A
    batch keeps its tokens: it has more rows instead.
    """

    start: int = Field(ge=1, description="tokens per row at first: sequence_length divided by a power of two")
    steps: int = Field(ge=1, description="steps until rows are whole sequences")


class DataSection(Section):
    """Token stores (directories that `weft data pack` wrote) and how they become batches."""

    train: Folder | DatasetSection | Annotated[list[Source], MinLen(1)] = Field(
        description="the token store to learn from, or {type: module:Class, ...}; a list of such mixes them"
    )
    validation: HeldOut | None = Field(
        None,
        description="held-out data: a store or {type: module:Class, ...}, or several by name, as {code: stores/code, "
        "prose: stores/prose}; none: no validation",
    )
    sequence_length: int | None = Field(
        None, ge=1, description="tokens per sequence; default: min(1024, max_position_embeddings)"
    )
    shuffle: bool = Field(True, description="a new order of sequences in each epoch, keyed by run.seed")
    workers: int = Field(0, ge=0, description="processes that read ahead, per rank; 0 reads in the training process")
    temperature: float | None = Field(
        None, gt=0, description="of sources without weights: these are size^(1 / temperature); default: 1"
    )
    curriculum: Annotated[list[StageSection], MinLen(1)] | None = Field(
        None, description="weights that change with the tokens seen"
    )
    mixture_block: int | None = Field(
        None, ge=1, le=1_000_000, description="sequences over which a mixture's shares are exact; default: 10,000"
    )
    packing: Literal["concatenate", "best_fit"] = Field(
        "concatenate",
        description="concatenate: documents end to end, cut anywhere; best_fit: whole documents put together so that "
        "little room is left, none cut that fits",
    )
    document_attention: bool = Field(
        False, description="keep attention and positions in each document; best_fit always does"
    )
    length_warmup: LengthWarmupSection | None = Field(None, description="short rows first; default: none")

    @property
    def sources(self) -> list[StoreSource | DatasetSource]:
        """`train` as a list of sources; empty if it is one store or dataset."""
        return list(self.train) if isinstance(self.train, list) else []

    @property
    def weighted(self) -> bool:
        """Whether the sources have shares of their own. If not, they are read as one: each sequence once an epoch."""
        own = any(source.weight is not None or source.max_epochs is not None for source in self.sources)
        return bool(self.sources) and bool(self.curriculum or self.temperature not in (None, 1.0) or own)

    def stages(self, sizes: Sequence[int], length: int) -> list[Stage]:
        """The stages of a weighted mixture.

        Args:
            sizes: sequences of each source, of which weights are made where none are given.
            length: tokens per sequence; a stage's tokens are rounded up to whole sequences.
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
        """The phases of a weighted mixture."""
        limits = [
            None if source.max_epochs is None else int(decimal_fraction(source.max_epochs) * size)
            for source, size in zip(self.sources, sizes, strict=True)
        ]
        return phases(self.stages(sizes, length), limits, self.mixture_block or BLOCK)

    @property
    def held_out(self) -> dict[str, str | DatasetSection]:
        """`validation` by name; what stands there by itself has the name ""."""
        return held_out_sets(self.validation)

    @property
    def stores(self) -> dict[str, str]:
        """The paths of token stores to learn from, by their keys."""
        if isinstance(self.train, str):
            return {"data.train": self.train}
        stores = ((number, source) for number, source in enumerate(self.sources) if isinstance(source, StoreSource))
        return {f"data.train[{number}].store": source.store for number, source in stores}

    @property
    def held_out_stores(self) -> dict[str, str]:
        """Those of token stores to validate on."""
        stores = ((name, store) for name, store in self.held_out.items() if isinstance(store, str))
        return {f"data.validation.{name}" if name else "data.validation": store for name, store in stores}
