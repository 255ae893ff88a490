"""Trains only the new rows of the embedding and the head; all other parameters stay bitwise unchanged.

This is for tokens that are added to a trained model (`weft resize`, `training.only_rows_from`). Gradients of frozen
rows are set to zero, so that they do not count in the gradient norm. If the optimizer changes frozen rows (by weight
decay, momentum, or an update that mixes rows), the change is reverted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.parallel.local_parameters import local, shard_part


def freeze_all_but_rows(model: nn.Module, first: int) -> None:
    """Freezes all parameters except the embedding and the head.

    Args:
        model: built-in decoder, on any device.
        first: first row to train. This function only checks that the row exists; `FrozenRows` keeps the earlier rows
            unchanged.

    Raises:
        UserError: if the model is not a built-in decoder, or has no row `first`.
    """
    if not isinstance(model, Decoder):
        raise UserError("training.only_rows_from needs a built-in decoder; remove the key")
    rows = model.config.vocab_size or 0
    if first >= rows:
        raise UserError(
            f"training.only_rows_from: {first:,}, but the embedding has rows 0 to {rows - 1:,}; set the first new row, "
            "or add rows with `weft resize`"
        )
    model.requires_grad_(False)
    for table in (model.embed_tokens, model.lm_head):  # None in some pipeline stages
        if table is not None:
            table.requires_grad_(True)


class FrozenRows:
    """The frozen rows of this rank's shards: rows before `first` of the embedding and the head.

    Args:
        model: from `build_sharded_model`, after `freeze_all_but_rows`.
        first: first row to train; None freezes no rows.
    """

    def __init__(self, model: nn.Module, first: int | None):
        self.count: dict[nn.Parameter, int] = {}
        for parameter in model.parameters():
            if first is not None and parameter.requires_grad:
                self.count[parameter] = _local_rows_below(parameter, first)

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Sets the gradients of frozen rows to zero."""
        for parameter, count in self.count.items():
            if parameter.grad is not None:
                local(parameter.grad)[:count].zero_()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context that copies frozen rows at its start, and restores them from the copy at its end."""
        saved = {parameter: local(parameter)[:count].clone() for parameter, count in self.count.items()}
        yield
        for parameter, rows in saved.items():
            local(parameter)[: len(rows)].copy_(rows)


def _local_rows_below(parameter: nn.Parameter, first: int) -> int:
    start, size = shard_part(parameter)
    return max(0, min(first - start[0], size[0]))
