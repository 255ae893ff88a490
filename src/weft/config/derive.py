"""Numbers of a run that follow from its config, the size of the data and the mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.config.mesh import MeshShape, ParallelSection
from weft.config.training import TrainingSection
from weft.errors import UserError

if TYPE_CHECKING:
    from weft.config.run import RunConfig

DEFAULT_SEQUENCES = 32  # of the global batch, if training.batch_tokens is not set
DEFAULT_MICRO_BATCH_TOKENS = 8192  # large enough for efficient matrix products, small enough for memory


@dataclass(frozen=True)
class RunLength:
    """The numbers of a run.

    Attributes:
        steps: optimizer updates.
        sequences_per_step: of the global batch.
        sequence_length: tokens per sequence.
        sequences_per_rank: sequences of each data rank in a step, including padding sequences.
        micro_batch_size: sequences per forward and rank.
        accumulation: forwards per step and rank.
        epochs: passes over the training data; None if its size is not known.
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
        """Tokens of the global batch."""
        return self.sequences_per_step * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of the run."""
        return self.steps * self.tokens_per_step


def batch_sequences(config: RunConfig) -> int:
    """Returns the sequences of the global batch."""
    length = sequence_length(config)
    return DEFAULT_SEQUENCES if config.training.batch_tokens is None else max(1, config.training.batch_tokens // length)


def sequence_length(config: RunConfig) -> int:
    """Returns the tokens per sequence."""
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
    """Returns the numbers of a run.

    Args:
        config: a checked config.
        train_tokens: tokens of the training data; a run of epochs needs them, or `train_samples`.
        train_samples: sequences of the training data; default: `(train_tokens - 1) // sequence_length`.
        mesh: default: one rank.

    Raises:
        UserError: for a run of epochs the size of the data is not known, or the run has no step.
    """
    training, length, sequences = config.training, sequence_length(config), batch_sequences(config)
    mesh = mesh or MeshShape()
    if train_samples is None and train_tokens is not None:
        train_samples = max(0, (train_tokens - 1) // length)
    steps = count_steps(training, sequences, length, train_samples)
    if steps is None:
        if training.epochs is None:
            raise UserError("training: the run has no length; set one of steps, tokens or epochs")
        raise UserError("training.epochs: the size of the training data is not known; set training.steps")
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


def split_batch(
    sequences: int, length: int, mesh: MeshShape, micro_batch_size: int | None, parallel: ParallelSection
) -> tuple[int, int]:
    """Returns the sequences of a data rank in a step, and its micro-batch size.

    Args:
        sequences: of the global batch.
        length: tokens per sequence.
        micro_batch_size: the configured size. None: up to DEFAULT_MICRO_BATCH_TOKENS, and with a pipeline at least one
            micro-batch for each stage.
    """
    per_rank = math.ceil(sequences / mesh.data_ranks)
    if micro_batch_size is not None:
        return per_rank, min(per_rank, micro_batch_size)
    most = min(per_rank, max(1, DEFAULT_MICRO_BATCH_TOKENS // length))
    if mesh.pp == 1:
        return per_rank, most
    stages = mesh.pp * parallel.virtual_stages
    fitting = [size for size in range(most, 0, -1) if parallel.supports(math.ceil(per_rank / size), mesh.pp)]
    return per_rank, next((size for size in fitting if math.ceil(per_rank / size) >= stages), min(fitting, default=1))


def count_steps(training: TrainingSection, sequences: int, length: int, samples: int | None) -> int | None:
    """Returns the optimizer updates of a run; None if they are not known.

    Args:
        sequences: of the global batch.
        length: tokens per sequence.
        samples: sequences of the training data, if known; a run of epochs needs them.
    """
    if training.steps is not None:
        return training.steps
    if training.tokens is not None:
        return -(-training.tokens // (sequences * length))
    if training.epochs is not None and samples is not None:
        return math.ceil(round(training.epochs * samples, 6) / sequences)
    return None
