"""`data:` the training and validation data, mixture weights and sequence layout."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, MinLen
from pydantic import Discriminator, Field, PrivateAttr, SerializerFunctionWrapHandler, Tag, model_serializer

from weft.config.section import Component, Folder, Section
from weft.headers import is_raw
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
    """A source of a mixture: a token store or raw data, or a custom dataset if `type: module:Class` is set in place of
    `store`.

    A string is short for `{store: string}`.
    """

    store: Folder
    """The token store. It can also be raw data, as in `data.train`."""
    weight: float | None = Field(None, ge=0)
    """Weight of the source. The source's share of the sequences is this weight divided by the sum of all weights. Set
    it for all sources or for none. Default: the number of sequences in the source (see `temperature`).
    """
    max_epochs: float | None = Field(None, gt=0)
    """Maximum number of passes over the source. After these passes, the other sources take over the source's share, in
    proportion to their weights. Default: no limit.
    """
    name: str | None = None
    """Name of the source in the curriculum and in reports. Default: the name of the folder, file or class."""

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
    """Length of the stage in tokens, rounded up to complete sequences. Required for each stage except the last one,
    which ignores this key: it lasts until the end of the run.
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
    """Token stores (directories that `weft data pack` writes) or raw data, and how batches are made from them.

    Raw data is a file, a folder, a pattern such as `chats/*.jsonl`, or a saved folder of Hugging Face `datasets`. Each
    run packs raw data into a cache first, or uses the cached token store (docs/tuning/data.md).
    """

    train: Folder | DatasetSection | Annotated[list[Source], MinLen(1)] | None = None
    """Training data: a token store, raw data, a custom dataset `{type: module:Class, ...}`, or a list of these, which
    is a mixture. `weft train` requires it; a program that passes its own batches to `Trainer.step` omits it.
    """
    validation: HeldOut | None = None
    """Held-out data: a token store, raw data, a custom dataset, or several of these, each with a name, such as `{code:
    stores/code, prose: stores/prose}`. With an objective that generates its training data: files of held-out prompts.
    Default: no validation.
    """
    layout: Literal["messages", "sharegpt", "alpaca", "pairs", "preferences", "text"] | None = None
    """Layout of the records of raw data. `messages`: OpenAI's messages; `pairs`: a prompt and an answer;
    `preferences`: a chosen and a rejected answer; `text`: texts without messages. Default:
    detected from the first records.
    """
    fields: dict[str, str] | None = None
    """Fields of the layout -> keys of the records of raw data, for keys that differ from the usual ones. For the layout
    `pairs`, `{input: question, target: answer}`; for texts, `{text: content}`. Default: the usual keys of the layout.
    """
    chat_template: str | None = None
    """Chat template for raw conversations: a file, or a built-in template: chatml, llama2, llama3, gemma, mistral,
    zephyr, vicuna or plain. Default: the template in the tokenizer's folder.
    """
    train_on: Literal["assistant", "last", "all"] | None = None
    """Tokens of raw conversations that are trained on: those of all assistant messages, of the last assistant message,
    or all tokens. Default: `assistant`.
    """
    overlong: Literal["drop", "truncate", "refuse"] | None = None
    """What is done with raw conversations of more than `sequence_length` tokens, with preferences whose two documents
    together have more, and with prompts that leave no room for `objective.max_new_tokens`. Default: `drop`, which
    leaves them out and reports their number. `refuse`: an error. `truncate` cuts off the end, at the same position in
    both documents of a preference; prompts cannot be truncated.
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
    packing: Literal["concatenate", "best_fit", "pad"] | None = None
    """Method that forms sequences from documents. `concatenate`: documents end to end, split at any token. `best_fit`:
    complete documents, packed with little padding; only documents longer than a sequence are split. `pad`: one document
    per sequence, filled up with padding. Default: `best_fit` if training data are conversations, else `concatenate`;
    without stores or raw data in `train`, validation data decide.
    """
    document_attention: bool = False
    """Whether each token attends only to tokens of its own document, and positions start from 0 in each document.
    `packing: best_fit` and `packing: pad` imply it.
    """
    length_warmup: LengthWarmupSection | None = None
    """Settings of a sequence length warm-up. Default: all sequences have the full length."""

    _packed: dict[str, str] = PrivateAttr(default_factory=dict)  # dotted key of raw data -> token store

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
    def paths(self) -> tuple[dict[str, str], dict[str, str]]:
        """The paths in `train`, and those in `validation`, by dotted configuration key."""
        stores = ((number, source) for number, source in enumerate(self.sources) if isinstance(source, StoreSource))
        train = {f"data.train[{number}].store": source.store for number, source in stores}
        if isinstance(self.train, str):
            train = {"data.train": self.train}
        held_out = ((name, path) for name, path in self.held_out.items() if isinstance(path, str))
        return train, {f"data.validation.{name}" if name else "data.validation": path for name, path in held_out}

    @property
    def raw(self) -> dict[str, str]:
        """The paths and patterns of raw data that are not packed yet, by dotted configuration key."""
        train, held_out = self.paths
        return {key: path for key, path in (train | held_out).items() if key not in self._packed and is_raw(path)}

    @property
    def stores(self) -> dict[str, str]:
        """The paths of the token stores for training, by dotted configuration key. Raw data must be packed first."""
        return self._only_stores(self.paths[0])

    @property
    def held_out_stores(self) -> dict[str, str]:
        """The paths of the token stores for validation, as in `stores`."""
        return self._only_stores(self.paths[1])

    def _only_stores(self, paths: dict[str, str]) -> dict[str, str]:
        found = {key: self._packed.get(key, path) for key, path in paths.items()}
        return {key: path for key, path in found.items() if not is_raw(path)}

    def packed_as(self, stores: Mapping[str, str], **changes: Any) -> DataSection:
        """Returns a copy that knows the token stores into which raw data was packed.

        Args:
            stores: path of the token store by dotted configuration key.
            changes: new values of other keys.
        """
        copied = self.model_copy(update=changes)
        copied._packed = {**self._packed, **stores}
        return copied

    @property
    def with_stores(self) -> DataSection:
        """A copy in which the token stores of packed raw data replace the raw data. Sources keep their names."""
        if not self._packed:
            return self
        train: Any = self._packed.get("data.train", self.train)
        if self.sources:
            train = [
                source.model_copy(update={"store": self._packed[key], "name": source.label})
                if (key := f"data.train[{number}].store") in self._packed
                else source
                for number, source in enumerate(self.sources)
            ]
        held_out: Any = {
            name: self._packed.get(f"data.validation.{name}" if name else "data.validation", value)
            for name, value in self.held_out.items()
        }
        if "" in held_out or not held_out:
            held_out = held_out.get("")
        return self.model_copy(update={"train": train, "validation": held_out})
