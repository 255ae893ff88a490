"""Gathers the input of a tensor parallel layer again in backward, so that a rank saves only its shard of the input.

The gradients of a layer's weights need the whole input (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022, section 4.2.2). The all-gather starts when the gradient of the layer's output arrives, so it
runs beside the backward pass of the layer's last product.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from weft.parallel import collectives
from weft.parallel.torch_private import all_gather, hooks_of_saved_tensors, wait_tensor
from weft.torch_private import storage_of, version_of


def with_gathered(forward: Callable[..., Tensor], shard: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Returns `forward` of the concatenation of all ranks' shards along `dim`. Autograd saves only the shard.

    All ranks of `group` must run backward in the same order. Not for compiled code.
    """
    shard = shard.contiguous()
    full = collectives.all_gather(shard, dim, group).contiguous()
    saved = _Saved(shard, full, dim, group)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        out = forward(full)
    if out.requires_grad:
        out.register_hook(_starting(weakref.ref(saved)))
    return out


def _starting(reference: weakref.ref[_Saved]) -> Callable[[Tensor], None]:
    """Returns a hook of the gradient of a layer's output, which starts the all-gather.

    The hook exists as long as the graph, such as a loss that a pipeline schedule holds; what autograd saved is freed
    in backward.
    """

    def start(_: Tensor) -> None:
        saved = reference()
        if saved is not None:
            saved.start()

    return start


class _View(NamedTuple):
    """A view of the full input, as autograd would have saved it."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Saved:
    """What autograd saves in a layer: in place of the full input a `_View`, and all other tensors as without it."""

    def __init__(self, shard: Tensor, full: Tensor, dim: int, group: ProcessGroup):
        self.outer_pack, self.outer_unpack = hooks_of_saved_tensors() or (_same, _same)
        self.shard, self.input = self.outer_pack(shard.detach()), _identity(full)
        self.dim, self.group = dim, group
        self.views = self.unread = 0
        self.pending: Tensor | None = None
        self.full: Tensor | None = None

    def start(self) -> None:
        """Starts the all-gather, if backward will read the input."""
        if self.views and self.pending is None and self.full is None:
            self.pending = all_gather(self.outer_unpack(self.shard), 0, self.group)

    def pack(self, tensor: Tensor) -> Any:
        if _identity(tensor) != self.input:
            return self.outer_pack(tensor)
        self.views += 1
        return _View(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _View):
            return self.outer_unpack(saved)
        full = self.full
        if full is None:
            self.start()
            assert self.pending is not None
            parts = wait_tensor(self.pending).unflatten(0, (self.group.size(), -1))
            full = parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1).contiguous()
            self.pending, self.unread = None, self.views
        self.unread -= 1
        self.full = full if self.unread else None
        return full.as_strided(*saved)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Identifies the storage of a tensor, its version (a layer can write in place over its input), and its dtype."""
    return storage_of(tensor), version_of(tensor), tensor.dtype


def _same(tensor: Any) -> Any:
    return tensor
