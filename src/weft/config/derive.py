"""Computes the length and the batch sizes of a run from its config, the size of the data and the mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.config.mesh import MeshShape, ParallelSection
from weft.config.training import TrainingSection
from weft.errors import UserError

if TYPE_CHECKING:
    from weft.config.run import RunConfig

DEFAULT_SEQUENCES = 32  # in the global batch, if training.batch_tokens is not set
DEFAULT_MICRO_BATCH_TOKENS = 8192  # large enough for efficient matrix products, small enough for memory


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The length and the intervals of a run whose batches are passed to `Trainer.step`.

    Attributes:
        steps: number of optimizer updates; None if the run has no length.
        validation_every, checkpoint_every, samples_every: intervals in steps; None: never.
    """

    steps: int | None
    validation_every: int | None
    checkpoint_every: int | None
    samples_every: int | None

    @property
    def tokens_per_step(self) -> int | None:
        """Number of tokens in the global batch; None if it is not known."""
        return None


@dataclass(frozen=True, kw_only=True)
class RunLength(Intervals):
    """The length, the batch sizes and the intervals of a run that reads `data.train`.

    Attributes:
        steps: number of optimizer updates.
        sequences_per_step: number of sequences in the global batch.
        sequence_length: number of tokens per sequence.
        sequences_per_rank: number of sequences per step on each data parallel rank, including padding sequences.
        micro_batch_size: number of sequences per forward pass and rank.
        accumulation: number of micro-batches per step and rank.
        epochs: number of passes over the training data; None if the size of the data is not known.
        validation_every, checkpoint_every, samples_every: intervals in steps.
    """

    steps: int
    sequences_per_step: int
    sequence_length: int
    sequences_per_rank: int
    micro_batch_size: int
    accumulation: int
    epochs: float | None
    validation_every: int
    checkpoint_every: int
    samples_every: int

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in the global batch."""
        return self.sequences_per_step * self.sequence_length

    @property
    def tokens(self) -> int:
        """Number of tokens of the run."""
        return self.steps * self.tokens_per_step


def batch_sequences(config: RunConfig) -> int:
    """Returns the number of sequences in the global batch."""
    length = sequence_length(config)
    return DEFAULT_SEQUENCES if config.training.batch_tokens is None else max(1, config.training.batch_tokens // length)


def sequence_length(config: RunConfig) -> int:
    """Returns the number of tokens per sequence."""
    if config.data.sequence_length is not None:
        return config.data.sequence_length
    return min(1024, getattr(config.model, "max_position_embeddings", None) or 1024)


def derive(
    config: RunConfig,
    *,
    train_tokens: int | None = None,
    train_samples: int | None = None,
    mesh: MeshShape | None = None,
) -> RunLength:
    """Returns the length, the batch sizes and the intervals of a run.

    Args:
        config: a checked config.
        train_tokens: number of tokens of the training data. If `training.epochs` is set, this or `train_samples` is
            required.
        train_samples: number of sequences of the training data; default: `(train_tokens - 1) // sequence_length`.
        mesh: the mesh of the run; default: one rank.

    Raises:
        UserError: no key sets the length of the run, the run is shorter than one step, or `training.epochs` is set and
            the size of the data is not known.
    """
    training, length, sequences = config.training, sequence_length(config), batch_sequences(config)
    mesh = mesh or MeshShape()
    if train_samples is None and train_tokens is not None:
        train_samples = max(0, (train_tokens - 1) // length)
    steps = count_steps(training, sequences, length, train_samples)
    if steps is None:
        if training.epochs is None:
            raise UserError("training: the run has no length; set one of steps, tokens or epochs")
        raise UserError("training.epochs: the size of the training data is not known; set training.steps instead")
    if steps < 1:
        raise UserError(
            "training: the training data are shorter than one sequence; shorten data.sequence_length or add data"
        )
    per_rank, micro = split_batch(sequences, length, mesh, training.micro_batch_size, config.parallel)
    tenth = max(1, steps // 10)
    validation = config.validation.every or tenth
    return RunLength(
        steps=steps,
        sequences_per_step=sequences,
        sequence_length=length,
        sequences_per_rank=per_rank,
        micro_batch_size=micro,
        accumulation=math.ceil(per_rank / micro),
        epochs=steps * sequences / train_samples if train_samples else None,
        validation_every=validation,
        checkpoint_every=config.checkpoint.every or tenth,
        samples_every=config.samples.every or validation,
    )


def derive_intervals(config: RunConfig) -> Intervals:
    """Returns the length and the intervals of a run whose batches are passed to `Trainer.step`.

    Without `training.steps`, the run has no length, and only the intervals that the config sets.

    Raises:
        UserError: the length is set in tokens or epochs, or an interval that the run needs cannot be derived.
    """
    training, steps = config.training, config.training.steps
    for key in ("tokens", "epochs"):
        if getattr(training, key) is not None:
            raise UserError(
                f"training.{key}: the sizes of batches that are passed to Trainer.step are not known in advance; set "
                "training.steps instead, or remove the key"
            )
    tenth = None if steps is None else max(1, steps // 10)
    validation = config.validation.every or tenth
    samples = config.samples.every or validation
    for key, needed, every in (
        ("validation.every", config.data.validation is not None, validation),
        ("samples.every", bool(config.samples.prompts), samples),
    ):
        if needed and every is None:
            raise UserError(f"{key}: cannot be derived, because the run has no length; set {key} or training.steps")
    return Intervals(
        steps=steps,
        validation_every=validation,
        checkpoint_every=config.checkpoint.every or tenth,
        samples_every=samples,
    )


def split_batch(
    sequences: int, length: int, mesh: MeshShape, micro_batch_size: int | str | None, parallel: ParallelSection
) -> tuple[int, int]:
    """Returns the number of sequences per step on a data parallel rank, and the micro-batch size.

    Args:
        sequences: number of sequences in the global batch.
        length: number of tokens per sequence.
        micro_batch_size: the configured size. None, or `auto` before a size is chosen: as many sequences as fit into
            DEFAULT_MICRO_BATCH_TOKENS; with a pipeline, fewer if a step would otherwise have fewer micro-batches than
            stages.
    """
    per_rank = math.ceil(sequences / mesh.data_ranks)
    if isinstance(micro_batch_size, int):
        return per_rank, min(per_rank, micro_batch_size)
    most = min(per_rank, max(1, DEFAULT_MICRO_BATCH_TOKENS // length))
    if mesh.pp == 1:
        return per_rank, most
    stages = mesh.pp * parallel.virtual_stages
    fitting = [size for size in range(most, 0, -1) if parallel.supports(math.ceil(per_rank / size), mesh.pp)]
    return per_rank, next((size for size in fitting if math.ceil(per_rank / size) >= stages), min(fitting, default=1))


def count_steps(training: TrainingSection, sequences: int, length: int, samples: int | None) -> int | None:
    """Returns the number of optimizer updates of a run; None if it is not known.

    Args:
        sequences: number of sequences in the global batch.
        length: number of tokens per sequence.
        samples: number of sequences of the training data, needed if `training.epochs` is set; None if it is not known.
    """
    if training.steps is not None:
        return training.steps
    if training.tokens is not None:
        return -(-training.tokens // (sequences * length))
    if training.epochs is not None and samples is not None:
        return math.ceil(round(training.epochs * samples, 6) / sequences)
    return None
