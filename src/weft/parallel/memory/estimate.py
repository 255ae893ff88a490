"""Estimates the peak memory of a rank during a training step from shapes alone, without allocating memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.config.model import ModelSection
from weft.formatting import byte_size
from weft.kernels.cross_entropy import KEPT_ELEMENTS
from weft.models.adapter import add_adapter, quantized_weights
from weft.models.decoder import Decoder
from weft.models.layers.blockwise import PACKED
from weft.models.layers.position import rotary_embeddings
from weft.parallel.local_parameters import local
from weft.parallel.model_state import ModelPlan, repeated_blocks
from weft.parallel.world import World
from weft.torch_private import fake_tensors, storage_of

DEVICES = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)  # usual memory sizes, in GB
RESERVE = 1.1  # factor for the fragmentation of the allocator and for workspaces
SELECTIVE = 0.5  # part of the saved tensors that `selective` keeps, for a Llama layer (docs/memory.md)


@dataclass(frozen=True)
class MemoryEstimate:
    """The estimated memory of a rank at the peak of a training step, in bytes.

    Attributes:
        frozen: this rank's shards of frozen parameters.
        trained: this rank's shards of trained parameters.
        gradients: accumulated gradients of these shards.
        optimizer: the optimizer's state of these shards.
        computed: copies of parameters for the computation: gathered by FSDP2, cast, or dequantized.
        saved: tensors that are saved for backward; None: unknown, for a model other than the built-in decoder, custom
            components, and experts with a capacity.
        logits: logits of one chunk of tokens.
        references: this rank's shards of the objective's frozen models.
    """

    frozen: int
    trained: int
    gradients: int
    optimizer: int
    computed: int
    saved: int | None
    logits: int
    references: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(value or 0 for value in vars(self).values())

    @property
    def device(self) -> int | None:
        """The smallest usual memory size, in GB, of a device for this rank; None if none is large enough."""
        return next((size for size in DEVICES if self.total * RESERVE <= size * 1e9), None)

    def lines(self) -> list[str]:
        """Returns the estimate as lines of text."""
        labels = {
            "frozen": "frozen parameters",
            "trained": "trained parameters",
            "gradients": "gradients",
            "optimizer": "optimizer state",
            "computed": "gathered, cast and dequantized parameters",
            "saved": "tensors saved for backward",
            "logits": "logits",
            "references": "frozen models of the objective",
        }
        shown = {label: getattr(self, name) for name, label in labels.items() if getattr(self, name)}
        found = [f"  {label:42}{byte_size(value):>10}" for label, value in shown.items()]
        if self.saved is None:
            found.append(f"  {labels['saved']:42}{'unknown':>10}")
        fits = "more than any usual device" if self.device is None else f"fits a device with {self.device} GB"
        return [*found, f"  {'total':42}{byte_size(self.total):>10}: {fits}"]


def estimate_memory(
    model: nn.Module,
    plan: ModelPlan,
    world: World,
    *,
    micro_batch_size: int,
    states: int = 2,
    frozen: Sequence[nn.Module] = (),
) -> MemoryEstimate:
    """Estimates the memory of this rank.

    Args:
        model: the assembled model of this rank (`weft.parallel.apply.assemble`), which can be on the meta device.
        micro_batch_size: number of sequences of a micro-batch. `plan.sequence` is their length.
        states: number of tensors that the optimizer keeps per parameter: 2 for AdamW.
        frozen: the assembled frozen models of the objective. If `model` itself is one of them, it is the reference that
            shares the base model of an adapter.
    """
    parameters = dict(model.named_parameters())
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    elements = sum(local(parameter).numel() for parameter in trained)
    on_host = plan.parallel.offload
    tokens = micro_batch_size * plan.sequence // world.shape.cp
    sizes = {name: local(parameter).nbytes for name, parameter in parameters.items()}
    rows = 0
    if isinstance(plan.model, ModelSection) and plan.model.vocab_size and not plan.model.num_labels:
        rows = plan.model.vocab_size // world.shape.tp
    kept = on_host != "parameters"
    return MemoryEstimate(
        frozen=kept * sum(size for name, size in sizes.items() if not parameters[name].requires_grad),
        trained=kept * sum(size for name, size in sizes.items() if parameters[name].requires_grad),
        gradients=kept * elements * (plan.reduce_dtype or plan.state_dtype).itemsize,
        optimizer=(on_host == "none") * elements * states * plan.state_dtype.itemsize,
        computed=_computed(model, plan, world),
        saved=_saved(plan, world, micro_batch_size) if _can_run(plan) else None,
        logits=min(tokens * rows, KEPT_ELEMENTS) * plan.dtype.itemsize,
        references=kept * sum(_reference(one, model) for one in frozen),
    )


def _reference(frozen: nn.Module, model: nn.Module) -> int:
    """Returns the bytes of a frozen model's shards, or of two copies of the adapter if it is the trained model.

    Beside the starting values of the adapter, the reference's forward pass keeps a copy of the current values.
    """
    if frozen is model:
        return 2 * sum(local(parameter).nbytes for parameter in model.parameters() if parameter.requires_grad)
    return sum(local(parameter).nbytes for parameter in frozen.parameters())


def _can_run(plan: ModelPlan) -> bool:
    """Whether the model is a decoder whose blocks run without memory: their shapes do not depend on values."""
    model = plan.model
    if not isinstance(model, ModelSection) or (model.moe is not None and model.moe.capacity_factor is not None):
        return False
    return not any(":" in getattr(model, key) for key in ("position", "norm", "hidden_act", "attention_implementation"))


def _computed(model: nn.Module, plan: ModelPlan, world: World) -> int:
    """Returns the bytes of gathered units, of cast parameters, and of the largest dequantized weight."""
    blocks, itemsize = repeated_blocks(model), plan.dtype.itemsize
    quantized = [codes.numel() * PACKED[codes.dtype] for codes, _, _ in quantized_weights(model).values()]
    # Codes as int32, values, and their product with the scales.
    dequantized = max(quantized, default=0) * (2 * itemsize + 2) // world.shape.tp
    per_block = [unsharded_bytes(block.parameters(), world, itemsize) for block in blocks]
    inner = {parameter for block in blocks for parameter in block.parameters()}
    root = unsharded_bytes((parameter for parameter in model.parameters() if parameter not in inner), world, itemsize)
    if world.ranks == 1 and plan.parallel.offload != "parameters":  # parameters that are cast stay until backward
        cast = sum(p.numel() for p in model.parameters() if p.is_floating_point() and p.dtype != plan.dtype)
        return dequantized + cast * itemsize
    if plan.parallel.reshards is False:
        return dequantized + root + sum(per_block)
    unit = plan.parallel.layers_per_fsdp_unit * max(per_block, default=0)
    return dequantized + root + (2 + plan.parallel.prefetch) * unit


def unsharded_bytes(parameters: Iterable[nn.Parameter], world: World, itemsize: int) -> int:
    """Returns the bytes of parameters as FSDP2 gathers them: in the compute dtype, and sharded over `tp` and `ep`."""
    total = 0
    for parameter in parameters:
        size = parameter.numel() * (itemsize if parameter.is_floating_point() else parameter.element_size())
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
                size //= world.shape.sizes[axis] if axis in ("tp", "ep") and placement.is_shard() else 1
        total += size
    return total


def _saved(plan: ModelPlan, world: World, micro_batch_size: int) -> int:
    """Returns the bytes that the blocks of this rank save for backward, by running each kind of block without memory.

    With `tp`, all saved tensors count as sharded. In a pipeline, up to one micro-batch per stage is in flight.
    """
    assert isinstance(plan.model, ModelSection)
    config, shape = plan.model, world.shape
    kinds: dict[bool, int] = {}
    for layer in range(config.num_hidden_layers):
        kinds.setdefault(config.has_experts(layer), layer)
    per_kind = saved_per_block(plan, micro_batch_size, plan.sequence // shape.cp, list(kinds.values()))
    inputs = micro_batch_size * plan.sequence // shape.cp * config.hidden_size * plan.state_dtype.itemsize // shape.tp
    mode, _, number = plan.activation_checkpointing.partition("-")
    total = largest = 0
    for layer in range(config.all_layers):  # a prediction layer counts like the last layer
        everything = per_kind[kinds[config.has_experts(layer)]] // shape.tp
        largest = max(largest, everything)
        parts = {"full": 0.0, "selective": SELECTIVE, "budget": float(number or 0)}
        recomputed = mode != "every" or (layer + 1) % int(number or 1) == 0
        total += everything if mode == "none" or not recomputed else max(inputs, int(parts.get(mode, 0.0) * everything))
    # A checkpointed block's saved tensors all exist while its backward runs.
    return -(-total // shape.pp) * shape.pp + (largest if mode != "none" else 0)


def saved_per_block(plan: ModelPlan, batch: int, seq: int, layers: list[int]) -> dict[int, int]:
    """Returns the bytes that blocks of the unsharded decoder save for backward, without memory for tensors.

    Args:
        batch: number of sequences.
        seq: number of tokens per sequence.
        layers: indices of the blocks to run.
    """
    config, found = plan.model, {}
    assert isinstance(config, ModelSection)
    with fake_tensors(), torch.device("cpu"):
        model = Decoder(config)
        if plan.adapter is not None:
            add_adapter(model, plan.adapter)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(plan.dtype)
        own = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        rotary = rotary_embeddings(config, model.position, torch.arange(seq).unsqueeze(0), plan.dtype)
        for layer in layers:
            x = torch.empty(batch, seq, config.hidden_size, dtype=plan.state_dtype, requires_grad=True)
            saved: dict[int, int] = {}

            def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
                if storage_of(tensor) not in own:
                    saved[storage_of(tensor)] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = model.layers[layer](x, rotary[config.slides(layer)] if config.rotates(layer) else None)
            found[layer] = sum(saved.values())
            del out
    return found
