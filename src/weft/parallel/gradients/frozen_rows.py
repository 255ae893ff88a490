"""Training only the new rows of the embedding and the head: every other number stays as it is, to the bit.

For tokens that were added to a trained model (`weft resize`, `training.only_rows_from`). Rows are a part of a
parameter, so freezing parameters is not enough: the old rows' gradients are cleared, that the norm may be of what is
trained, and an update that moved them (by weight decay, by momentum, or in an optimizer that mixes rows) is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.parallel.local_parameters import local
from weft.torch_private import compute_local_shape_and_global_offset


def freeze_all_but_rows(model: nn.Module, first: int) -> None:
    """Leave only the embedding and the head to be trained; a tied head is the embedding.

    Args:
        model: the built-in decoder, on any device.
        first: the first row that will be trained.

    Raises:
        UserError: another model, or one without such a row.
    """
    if not isinstance(model, Decoder):
        raise UserError(
            "training.only_rows_from is the built-in decoder's: of another model it is not known what rows are"
        )
    rows = model.config.vocab_size or 0
    if first >= rows:
        raise UserError(
            f"training.only_rows_from: {first:,}, and the model has rows 0 to {rows - 1:,}; `weft resize` adds new ones"
        )
    model.requires_grad_(False)
    for table in (model.embed_tokens, model.lm_head):  # of a pipeline's stages not all have them
        if table is not None:
            table.requires_grad_(True)


class OldRows:
    """The rows below `first` of all trained parameters, of which this rank may hold some, all or none.

    Args:
        model: from `build_sharded_model`, with `freeze_all_but_rows` done.
        first: the first row that is trained; None: all are, and nothing here does anything.
    """

    def __init__(self, model: nn.Module, first: int | None):
        self.count: dict[nn.Parameter, int] = {}
        for parameter in model.parameters():
            if first is not None and parameter.requires_grad:
                self.count[parameter] = _below(parameter, first)

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Set the old rows' gradients to zero."""
        for parameter, count in self.count.items():
            if parameter.grad is not None:
                local(parameter.grad)[:count].zero_()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put the old rows back as they were, whatever the block does to them. Costs a copy of them meanwhile."""
        kept = {parameter: local(parameter)[:count].clone() for parameter, count in self.count.items()}
        yield
        for parameter, rows in kept.items():
            local(parameter)[: len(rows)].copy_(rows)


def _below(parameter: nn.Parameter, first: int) -> int:
    """How many of this rank's rows are below `first` in the whole parameter."""
    if not isinstance(parameter, DTensor):
        return min(first, len(parameter))
    size, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return max(0, min(first - start[0], size[0]))
