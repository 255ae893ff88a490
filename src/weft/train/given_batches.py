"""Defines `GivenBatches`, which checks the batches that are passed to `Trainer.step` and takes this rank's part."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import torch

from weft.config.derive import split_batch
from weft.config.legal_mesh import sequence_unit
from weft.config.run import RunConfig
from weft.data.batches.batch import Batch
from weft.data.batches.given import ALIGNED, batch_from
from weft.data.batches.layout import TOKEN_KEYS, Layout
from weft.errors import UserError
from weft.parallel.objective import Objective
from weft.parallel.ranks import all_gather_object, error_on_all_ranks
from weft.parallel.world import World

CHECKSUM = 0xFFFFF  # 20 bits: sums of squares over 4,096 ranks are exact in float64


class GivenBatches:
    """Converts what is passed to `Trainer.step` to this rank's part of a global batch.

    Args:
        form: "global": each rank passes the same global batch. "local": each rank passes the sequences of its data
            parallel rank; the ranks of `pp`, `cp` and `tp` pass the same ones.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        objective: Objective,
        layout: Layout,
        form: Literal["global", "local"],
    ):
        self.config, self.world, self.objective, self.layout, self.form = config, world, objective, layout, form
        self.unit = sequence_unit(config, world.shape)
        self.longest: int | None = getattr(config.model, "max_position_embeddings", None)

    def batch(self, given: Any, step: int) -> Batch:
        """Returns this rank's sequences.

        Args:
            given: a dict of CPU tensors or arrays, or a `Batch` (see `batch_from`). Anything else is passed to the
                objective's `batch`, which returns a dict.
            step: number of updates so far.

        Raises:
            UserError: on all ranks, if the batch of any rank is not valid, or ranks passed different batches. An
                exception that the objective's `batch` raises on any rank is also raised on all ranks.
        """
        batch, failure = None, None
        try:
            batch = self._convert(given, step)
        except Exception as error:
            failure = error

        def checked() -> Batch:
            if failure is not None:
                raise failure
            assert batch is not None
            return batch

        if self.world.ranks > 1 and self._compare(batch):
            self.world.agree(checked)  # raises the exception on all ranks
        batch = checked()
        return batch.of_rank(self.world.data_rank, self.world.data_ranks) if self.form == "global" else batch

    def micro_batch_size(self, batch: Batch) -> int:
        """Returns the number of sequences per forward pass, for this rank's sequences of a global batch."""
        sequences = self.layout.sequences
        return self._micro_batch(len(batch.tokens) // sequences, batch.tokens.shape[1]) * sequences

    def _micro_batch(self, samples: int, length: int) -> int:
        """Returns the number of samples per forward pass, for `samples` on each data parallel rank."""
        config, shape = self.config, self.world.shape
        size = samples * shape.data_ranks, length * self.layout.sequences
        return split_batch(*size, shape, config.training.micro_batch_size, config.parallel)[1]

    def _convert(self, given: Any, step: int) -> Batch:
        """Returns the batch that this rank passes, converted and checked."""
        world, sequences = self.world, self.layout.sequences
        if not isinstance(given, Batch) and not (isinstance(given, Mapping) and {"tokens", ALIGNED} & given.keys()):
            given = self._from_records(given)
        batch = batch_from(given, self.layout)
        samples = len(batch.tokens) // sequences
        self._check_size(samples, batch.tokens.shape[1])
        if not isinstance(given, Batch):  # dropout is keyed by the index of the sample in the run
            place = step if self.form == "global" else step * world.data_ranks + world.data_rank
            batch.samples += place * samples
        return batch

    def _from_records(self, records: Any) -> Mapping[str, Any] | Batch:
        """Returns what the objective's `batch` makes of the user's records."""
        make, name = getattr(self.objective, "batch", None), self.config.objective.type
        if make is None:
            raise UserError(
                f"the batch is a {type(records).__name__} without tokens or input_ids; pass a dict of CPU tensors, or "
                f"define batch(records) in the objective ({name}), which returns such a dict"
            )
        made = make(records)
        if not isinstance(made, Mapping | Batch):
            raise UserError(f"objective: {name}.batch returned a {type(made).__name__}; return a dict of CPU tensors")
        return made

    def _check_size(self, samples: int, length: int) -> None:
        """Raises UserError if this mesh or the model does not support the number of samples, or their length."""
        shape, parallel = self.world.shape, self.config.parallel
        if self.longest is not None and length > self.longest:
            raise UserError(
                f"the batch has sequences of {length:,} tokens, but the model has {self.longest:,} positions; shorten "
                "them, or set model.max_position_embeddings"
            )
        if length % self.unit:
            axes = " x ".join(f"{axis} {shape.sizes[axis]}" for axis in ("cp", "tp") if shape.sizes[axis] > 1)
            raise UserError(
                f"the batch has sequences of {length:,} tokens, which {axes} cannot split; pad them to a multiple of "
                f"{self.unit}"
            )
        if shape.pp == 1:
            return
        each = math.ceil(samples / shape.data_ranks) if self.form == "global" else samples
        micro = self._micro_batch(each, length)
        count = math.ceil(each / micro)
        if not parallel.supports(count, shape.pp):
            raise UserError(
                f"the batch has {each} samples for each data parallel rank, {micro} per micro-batch: {count} "
                f"micro-batches, which {parallel.pp_schedule} does not support on {shape.pp} ranks; pass another "
                "number of samples, or set training.micro_batch_size"
            )

    def _compare(self, batch: Batch | None) -> bool:
        """Checks that all ranks passed batches of one size, and ranks that share sequences the same batch.

        Args:
            batch: this rank's batch; None if it is not valid.

        Returns:
            Whether the batch of any rank is not valid.

        Raises:
            UserError: on all ranks, if the batches do not fit together.
        """
        world, rows = self.world, 0 if batch is None else len(batch.tokens)
        number = 0 if batch is None else checksum(batch)
        found = world.sum(
            number, number**2, rows, rows**2, votes=[float(batch is None), float(number), float(number**2)]
        )
        first, first_squares, total_rows, row_squares, invalid, total, squares = map(int, found)
        if invalid:
            return True
        sharing, count = world.ranks // world.data_ranks, world.data_ranks
        # Numbers are equal if and only if their number x the sum of their squares is the square of their sum.
        if self.form == "global" and world.ranks * squares != total**2:
            raise error_on_all_ranks(
                "the ranks passed different batches, but with batches='global' all must pass the same one; seed the "
                "loader equally on all ranks, or use batches='local'"
            )
        if total != sharing * first or squares != sharing * first_squares:
            raise error_on_all_ranks(
                "ranks of one data parallel rank passed different batches; choose the sequences by "
                "trainer.mesh.dp_rank, which ranks of pp, cp and tp share"
            )
        if self.form == "local" and count * row_squares != total_rows**2:
            sizes = all_gather_object((world.data_rank, rows))
            listed = ", ".join(f"{size} on data parallel rank {rank}" for rank, size in dict(sizes).items())
            raise error_on_all_ranks(f"the batches have different sizes: {listed}; pass equally many sequences")
        return False


def checksum(batch: Batch) -> int:
    """Returns a checksum of all tensors of a batch, up to `CHECKSUM`."""
    found, tensors = 0, {key: getattr(batch, key) for key in (*TOKEN_KEYS, "samples")}
    for name, tensor in [*tensors.items(), *sorted(batch.extra.items())]:
        if tensor is not None:
            found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
            found = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy(), found)
    return found & CHECKSUM


def without_training_data(config: RunConfig) -> RunConfig:
    """Returns a copy of a config without the keys that choose the batches, for a run whose batches are given."""
    data = config.data.model_copy(update={"train": None, "length_warmup": None})
    training = config.training.model_copy(update={"batch_tokens": None})
    return config.model_copy(update={"data": data, "training": training})
