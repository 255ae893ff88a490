"""Defines the noise that training adds to embeddings, drawn independently of the mesh and of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.data.batches.batch import Batch
from weft.models.decoder import Decoder
from weft.parallel.ranks import error_on_all_ranks
from weft.parallel.world import World

if TYPE_CHECKING:
    from weft.parallel.axes.context import SequenceShard

SALT = 0x5DEECE66D  # a sample's noise and dropout must not start from the same seed


class EmbeddingNoise:
    """Adds uniform noise to the embeddings of tokens in training (NEFTune; Jain et al., 2023).

    The noise of a token is uniform in [-m, m] with m = alpha / sqrt(n d), where d is the hidden size, and n the number
    of tokens of the token's document in its sequence. Without `segments`, a sequence is one document. The noise is
    added to the output of the embedding layer, before the embedding multiplier and the position embedding.

    Each sample has its own random generator, which draws the noise of the complete sample. A rank with a shard of the
    sequence selects its own tokens. So the noise depends neither on the mesh nor on micro-batches.

    Args:
        model: sharded model. In a pipeline, only the first stage has the embedding.
        alpha: magnitude of the noise.
        sequence_shard: selects this rank's shard of each sequence; None without `cp`.

    Raises:
        UserError: the model is custom, so that its embedding is not known.
    """

    def __init__(self, model: nn.Module, alpha: float, world: World, sequence_shard: SequenceShard | None):
        self.alpha, self.world, self.sequence_shard = alpha, world, sequence_shard
        self.batch: Batch | None = None
        embedding = _embedding(model)
        if embedding is not None:
            embedding.register_forward_hook(self._add)

    def begin(self, batch: Batch, seed: Callable[[int], int]) -> None:
        """Sets the micro-batch of the following forward passes.

        Args:
            batch: the micro-batch, with complete sequences.
            seed: function from the index of a sample to the seed of its random numbers.
        """
        self.batch, self.seed = batch, seed

    def _add(self, embedding: nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor | None:
        """Forward hook of the embedding: adds noise to its output, `[batch, this rank's tokens, hidden]`.

        Only the first look-up of a forward pass has noise, not those of multi-token prediction layers.
        """
        batch, self.batch = self.batch, None
        if batch is None or not embedding.training:
            return None
        return output + self._draw(batch, output).to(output.dtype)

    def _draw(self, batch: Batch, output: torch.Tensor) -> torch.Tensor:
        """Returns the noise of this rank's tokens. Has the shape of `output`, and at least float32."""
        seq, hidden, device = batch.tokens.shape[1], output.shape[-1], output.device
        lengths = batch.at_tokens(batch.document_sums(torch.ones(batch.tokens.shape)))
        positions = torch.arange(seq, device=device)
        if self.sequence_shard is not None:
            positions = self.sequence_shard.positions(seq, batch.segments is not None, device)
        if output.shape[1] < len(positions):  # tp shards the sequence between layers
            positions = positions.chunk(self.world.shape.tp)[self.world.axis_rank("tp")]
        dtype, generator = torch.promote_types(output.dtype, torch.float32), torch.Generator(device)
        noise = []
        for sample, rows in groupby(batch.samples.tolist()):
            shape = (len(list(rows)), seq, hidden)
            generator.manual_seed(self.seed(sample) ^ SALT)
            drawn = torch.rand(shape, dtype=dtype, device=device, generator=generator)
            noise.append(drawn.index_select(1, positions))
        scale = (self.alpha / (lengths * hidden).sqrt()).to(device, dtype).index_select(1, positions)
        return (torch.cat(noise) * 2 - 1) * scale.unsqueeze(-1)


def _embedding(model: nn.Module) -> nn.Module | None:
    """Returns the embedding layer of a model; None in later stages of a pipeline."""
    if isinstance(model, Decoder):
        return model.embed_tokens
    if not hasattr(model, "get_input_embeddings"):
        raise error_on_all_ranks(
            f"objective.neftune: the embedding of {type(model).__name__.removeprefix('FSDP')} is not known; add a "
            "method get_input_embeddings that returns it, or set neftune to 0"
        )
    return model.get_input_embeddings()
