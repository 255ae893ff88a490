"""`data:` what is read, in which shares, and how it is cut into sequences."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from weft.config.section import Component, Section


class DatasetSection(Component):
    """A dataset of the user's own: `{type: module:Class, ...its arguments}`.

    The class has `__len__` and `__getitem__(i) -> {"tokens": int array [seq], ...}` (docs/own-components.md).
    """


class _Source(Section):
    @model_serializer(mode="wrap")
    def _without_nulls(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if value is not None}


class StoreSource(_Source):
    """A token store in a mixture. A text stands for `{store: text}`."""

    store: str = Field(description="the token store; instead of it, `type: module:Class` is a dataset of your own")
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

    train: str | DatasetSection | list[StoreSource | DatasetSource] = Field(
        description="the token store to learn from, or {type: module:Class, ...}; a list of such mixes them"
    )
    validation: str | DatasetSection | None = Field(
        None, description="held-out data: a store or {type: module:Class, ...}; none: no validation"
    )
    sequence_length: int | None = Field(
        None, ge=1, description="tokens per sequence; default: min(1024, max_position_embeddings)"
    )
    shuffle: bool = Field(True, description="a new order of sequences in each epoch, keyed by run.seed")
    workers: int = Field(0, ge=0, description="processes that read ahead, per rank; 0 reads in the training process")
    temperature: float | None = Field(
        None, gt=0, description="of sources without weights: these are size^(1 / temperature); default: 1"
    )
    curriculum: list[StageSection] | None = Field(None, description="weights that change with the tokens seen")
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
