"""`data:` what is read, and how it is cut into sequences."""

from __future__ import annotations

from pydantic import Field

from weft.config.section import Component, Section


class DatasetSection(Component):
    """A dataset of the user's own: `{type: module:Class, ...its arguments}`.

    The class has `__len__` and `__getitem__(i) -> {"tokens": int array [seq], ...}` (see `weft.data.batch`).
    """


class DataSection(Section):
    """Token stores (directories that `weft data pack` wrote) and how they become batches."""

    train: str | DatasetSection = Field(description="the token store to learn from, or {type: module:Class, ...}")
    validation: str | DatasetSection | None = Field(
        None, description="held-out data of the same kinds; none: no validation"
    )
    sequence_length: int | None = Field(
        None, ge=1, description="tokens per sequence; default: min(1024, max_position_embeddings)"
    )
    shuffle: bool = Field(True, description="a new order of sequences in each epoch, keyed by run.seed")
    workers: int = Field(0, ge=0, description="processes that read ahead, per rank; 0 reads in the training process")
