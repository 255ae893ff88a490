"""A tensor parallel layer as one of two imagined ranks, with its input gathered again or kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from imagined import imagined
from torch.multiprocessing.reductions import StorageWeakRef
from wire import Wire

from weft.parallel import collectives
from weft.parallel.memory.activations import checkpointed
from weft.parallel.memory.gathered_input import with_gathered

ROWS, SEQ, WIDTH, INNER = 3, 4, 8, 16


def layers(rows: int) -> dict[str, Any]:
    """What a layer does with its input: gradients, bytes in its saved tensors, and the order of backward."""
    with imagined(2):
        return {
            "kept": _layer(_kept, rows),
            "again": _layer(with_gathered, rows),
            "twice": _layer(with_gathered, rows, 2),
        }


def written_over() -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a layer's shard, if the layer writes in place over its input: kept, and gathered again.

    The layer also saves its input as another dtype.
    """

    def forward(full):
        return full.mul_(2.0).square() + full.view(torch.complex128).abs().repeat_interleave(2, -1)

    def gradient(gathers):
        shard = torch.linspace(1.0, 2.0, 12, dtype=torch.float64).view(1, 3, 4).requires_grad_()
        gathers(forward, shard.sin(), 1, dist.group.WORLD).sum().backward()
        return shard.grad

    with imagined(2):
        return gradient(_kept), gradient(with_gathered)


def freed() -> bool:
    """Whether backward frees the shard of a layer's input, though the layer's output still exists."""
    with imagined(2):
        weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
        shard = torch.ones(ROWS, SEQ, WIDTH)
        out = with_gathered(lambda full: F.linear(full, weight), shard, 1, dist.group.WORLD)
        storage = StorageWeakRef(shard.untyped_storage())
        del shard
        assert not storage.expired()
        out.sum().backward()
        return storage.expired()


def _kept(forward, shard, dim, group):
    return forward(collectives.all_gather(shard, dim, group))


def _layer(gathers, rows: int, times: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)
    shard = torch.randn(rows, SEQ // 2, WIDTH, dtype=torch.float64, requires_grad=True)
    gate, up, down = (torch.randn(*shape, dtype=torch.float64) for shape in ((INNER, WIDTH),) * 2 + ((WIDTH, INNER),))
    weights = [weight.requires_grad_() for weight in (gate, up, down)]
    saved, wire = {}, Wire()

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def forward(full):
        inner = F.silu(F.linear(full, gate)) * F.linear(full, up)
        inner.register_hook(lambda _: wire.mark("the last product is done"))
        return F.linear(inner, down)

    own = {weight.untyped_storage().data_ptr() for weight in weights}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = gathers(forward, shard.sin(), 1, dist.group.WORLD)
    with wire:
        for number in range(times):
            out.square().mean().backward(retain_graph=number + 1 < times)
    gradients = [tensor.grad for tensor in (shard, *weights)]
    held = sum(size for storage, size in saved.items() if storage not in own)
    return {"gradients": gradients, "saved": held, "backward": [call.kind for call in wire.calls]}


def left_after_budget(kept: float) -> int:
    """Collectives of a block in mode `budget-X` that nothing has waited for after backward."""
    with imagined(2):
        torch.manual_seed(0)
        x = torch.randn(ROWS, SEQ, WIDTH, requires_grad=True)
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

        def forward(x):
            received = collectives.reduce_scatter(F.linear(x, weight), 1, dist.group.WORLD)
            return F.linear((x[:, : SEQ // 2] + received).sin(), weight).cos()

        checkpointed(forward, f"budget-{kept}", 0, 1, compile=False)(x).sum().backward()
        return torch._C._distributed_c10d._get_work_registry_size()
