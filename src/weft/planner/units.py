"""The times of FSDP2 units: passes of their layers, collectives inside of the layers, and those of their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.config.derive import batch_sequences, sequence_length, split_batch
from weft.config.mesh import choose_cp_method, mesh_shape
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.parallel.stages import embeds_at_end, stage_ranges
from weft.planner.communication import Group, Links, mesh_groups
from weft.planner.compute import Costs, Passes
from weft.planner.hardware import Hardware
from weft.planner.timeline import Parts
from weft.planner.work import (
    WIDTHS,
    Shares,
    Stack,
    Work,
    allows_ring,
    block_kinds,
    block_work,
    embedding_work,
    head_work,
    recomputes_head,
)

ASYNC_TP = 0.8  # fraction of a matrix product beside which async TP hides communication


@dataclass(frozen=True)
class Unit:
    """A piece of a stage, such as a block, on one rank.

    Attributes:
        passes: seconds of its computation for one micro-batch.
        forward, backward: seconds of collectives by axis for which the computation waits, for one micro-batch.
        gather: seconds of all-gathering its parameters over the ranks of FSDP2.
        gather_again: the same for backward, if parameters are resharded after forward.
        reduce: seconds of reducing its gradients over the ranks of FSDP2.
        replicate: seconds of the all-reduce of its gradients over `dp_replicate`.
        copies: seconds of copies between FSDP2's buffers and the parameters, for each gather and each reduction.
        accumulate: seconds of adding its gradients to those of earlier micro-batches.
        host: seconds of the host, for each gather and each reduction.
        parameters: number of its parameters after `tp` and `ep`, before FSDP2 shards them.
        local: number of its parameters on this rank.
    """

    passes: Passes = field(default_factory=Passes)
    forward: Parts = field(default_factory=Parts)
    backward: Parts = field(default_factory=Parts)
    gather: float = 0.0
    gather_again: float = 0.0
    reduce: float = 0.0
    replicate: float = 0.0
    copies: float = 0.0
    accumulate: float = 0.0
    host: float = 0.0
    parameters: int = 0
    local: float = 0.0

    @property
    def around(self) -> float:
        """Seconds of computation around each gather and each reduction."""
        return self.copies + self.host


def join_units(units: Iterable[Unit]) -> Unit:
    """Returns several units as one, as `layers_per_fsdp_unit` joins blocks."""
    found = list(units)

    def total(name: str) -> float:
        return sum(getattr(unit, name) for unit in found)

    names = ("forward", "backward_input", "backward_weight", "recompute")
    passes = Passes(*(sum(getattr(unit.passes, name) for unit in found) for name in names))
    forward, backward = Parts(), Parts()
    for unit in found:
        forward, backward = forward.plus(unit.forward), backward.plus(unit.backward)
    names = ("gather", "gather_again", "reduce", "replicate", "copies", "accumulate", "local")
    sizes = {name: total(name) for name in names}
    host = max((unit.host for unit in found), default=0.0)
    return Unit(passes, forward, backward, host=host, parameters=int(total("parameters")), **sizes)


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, or the full model.

    Attributes:
        root: parameters that are gathered first and reduced last: of embedding and head if they are not FSDP2 units
            (`embeds_at_end`), else of the final norm.
        first: the embedding; None if the stage has none.
        units: the FSDP2 units of blocks, in the order of forward.
        last: the head; None if the stage has none.
    """

    root: Unit
    first: Unit | None
    units: tuple[Unit, ...]
    last: Unit | None

    @property
    def pieces(self) -> tuple[Unit, ...]:
        """The embedding, the units of blocks and the head, in the order of forward."""
        return tuple(unit for unit in (self.first, *self.units, self.last) if unit is not None)

    @property
    def local(self) -> float:
        """Number of parameters on this rank."""
        return self.root.local + sum(unit.local for unit in self.pieces)


class Job:
    """A run on a number of devices, as the planner sees it: sizes, groups, costs and stages.

    Args:
        config: a checked config; its mesh must be legal.
        devices: number of ranks.
        hardware: the hardware file.
        stack: how the software differs from Weft's.

    Raises:
        UserError: the model is not a built-in decoder, its vocabulary is not known, the device does not support the
            dtype, or the mesh does not fit the number of devices.
    """

    def __init__(self, config: RunConfig, devices: int, hardware: Hardware, stack: Stack | None = None):
        if not isinstance(config.model, ModelSection):
            raise UserError(f"model.type: {config.model.type}, but plans are for type: decoder; use weft parallelize")
        self.config, self.hardware, self.stack = config, hardware, stack or Stack()
        self.model, self.parallel, self.training = config.model, config.parallel, config.training
        if config.model.vocab_size is None:
            raise UserError("model.vocab_size: not known without a tokenizer; set it for the plan")
        self.vocabulary: int = config.model.vocab_size
        self.devices, self.mesh = devices, mesh_shape(config.parallel, devices)
        self.sequences, self.length = batch_sequences(config), sequence_length(config)
        per_rank, self.micro = split_batch(
            self.sequences, self.length, self.mesh, self.training.micro_batch_size, self.parallel
        )
        self.micro_batches = -(-per_rank // self.micro)
        self.dtype = compute_dtype(self.training.dtype, hardware)
        self.costs = Costs(hardware, self.dtype, fp8=bool(self.training.fp8))
        self.links, self.groups = Links(hardware), mesh_groups(self.mesh)
        self.host = hardware.host if hardware.device.kind == "cpu" else hardware.host.without_collectives
        state = "float64" if self.dtype == "float64" else "float32"
        reduce = state if self.training.reduce_dtype == "auto" else self.training.reduce_dtype
        self.width, self.state, self.reduce_width = WIDTHS[self.dtype], WIDTHS[state], WIDTHS[reduce]
        self.gathered_width = 1 if self.training.fp8 == "rowwise" else self.width  # of the blocks' linear layers
        self.sent = self.width if self.parallel.pp_residual == "compute" else self.state  # between pipeline stages
        fused = bool(self.training.compile) if self.stack.fused is None else self.stack.fused
        self.shares = Shares(
            model=self.model,
            sequences=self.micro,
            length=self.length,
            mesh=self.mesh,
            width=self.width,
            residual=self.stack.residual_bytes or self.state,
            fused=fused,
            keeps_logits=self.stack.keeps_logits,
            fused_attention=self.stack.fused_attention,
        )
        self.trained = config.adapter is None
        self.again = self._group_after_forward()
        # FSDP2 has no streams on a CPU: each of its collectives is waited for at once. Plain replicas do not use FSDP2.
        self.blocks = hardware.device.kind == "cpu" and devices > self.mesh.dp_replicate

    def stages(self) -> list[Stage]:
        """Returns the pipeline stages; one without a pipeline."""
        kinds = block_kinds(self.model)
        blocks: dict[tuple[bool, bool, bool], Unit] = {}
        layers = self.model.num_hidden_layers
        for layer, kind in enumerate(kinds):
            key = (*kind, layer >= layers)
            if key not in blocks:
                blocks[key] = self.block(layer)
        ordered = [blocks[(*kind, layer >= layers)] for layer, kind in enumerate(kinds)]
        if self.mesh.pp == 1:
            return [self.stage(ordered, begins=True, ends=True)]
        ranges = stage_ranges(self.model, self.parallel.model_copy(update={"pp": self.mesh.pp}), self.length)
        last = len(ranges) - 1
        return [
            self.stage(
                [ordered[layer] for layer in span] + (ordered[layers:] if number == last else []),
                begins=number == 0,
                ends=number == last,
            )
            for number, span in enumerate(ranges)
        ]

    def stage(self, blocks: list[Unit], *, begins: bool, ends: bool) -> Stage:
        """Returns the stage of some blocks, with the embedding if it begins the model, and the head if it ends it."""
        size = self.parallel.layers_per_fsdp_unit
        units = tuple(
            join_units(blocks[at : at + size]) if size > 1 else blocks[at] for at in range(0, len(blocks), size)
        )
        first = self.piece(embedding_work(self.shares, self.vocabulary), "embedding") if begins else None
        last = None
        if ends:
            work = head_work(self.shares, self.vocabulary)
            last = self.piece(work, "head", repeated=float(recomputes_head(self.shares, work)))
        if not embeds_at_end(self.model):
            norm = self.piece(Work(parameters=self.model.hidden_size), "norm") if ends else Unit()
            return Stage(norm, first, units, last)
        computing = [None if end is None else Unit(end.passes, end.forward, end.backward) for end in (first, last)]
        root = join_units(unit for unit in (first, last) if unit is not None)
        return Stage(root, computing[0], units, computing[1])

    def block(self, layer: int) -> Unit:
        """Returns the unit of one block."""
        work = block_work(self.shares, layer)
        repeated = self.costs.recomputed(work, self.training.activation_checkpointing)
        return self.piece(work, "block", repeated=repeated)

    def piece(self, work: Work, kind: str, *, repeated: float = 0.0) -> Unit:
        """Returns the unit of a piece of work.

        Args:
            kind: `block`, `embedding` or `head`.
            repeated: fraction of its forward pass that backward repeats.
        """
        passes = self.costs.passes(work, trained=self.trained, repeated=repeated, head=kind == "head")
        forward, backward = self._waits(work, kind, passes)
        if kind == "block" and repeated == 1.0:
            backward = backward.plus(forward)
        elif kind == "block" and self.training.activation_checkpointing.startswith("every-"):
            backward = backward.plus(forward, repeated)
        elif kind == "block" and self.training.activation_checkpointing == "selective":
            backward["tp"] *= 1.5  # gathers the inputs of attention and of the MLP again
        fsdp, experts = self.groups["fsdp"], self.groups["efsdp"]
        local = work.parameters / fsdp.ranks + work.expert_parameters / experts.ranks
        total = work.parameters + work.expert_parameters
        trained = self.trained and total > 0
        width = self.gathered_width if kind == "block" else self.width
        again = width if self.again == fsdp else self.width
        return Unit(
            passes,
            forward,
            backward,
            gather=self._over_fsdp("all_gather", work, width, fsdp, self.width),
            gather_again=self._over_fsdp("all_gather", work, again, self.again, self.width),
            reduce=self._over_fsdp("reduce_scatter", work, self.reduce_width, fsdp) if trained else 0.0,
            replicate=self._replicate(local) if trained else 0.0,
            copies=self._copies(work),
            accumulate=self.costs.moved(3 * (local if self.parallel.reduces_every else total) * self.reduce_width)
            if trained
            else 0.0,
            host=self.host.fsdp_us * 1e-6 if max(fsdp.ranks, experts.ranks) > 1 and total else 0.0,
            parameters=total,
            local=local,
        )

    def _over_fsdp(self, kind, work: Work, width: int, group: Group, experts_width: int | None = None) -> float:
        """Returns the seconds of all-gathering or reducing parameters; those of experts have a group of their own."""
        seconds = self.links.seconds(kind, work.parameters * width, group)
        experts, wide = self.groups["efsdp"], width if experts_width is None else experts_width
        if self.parallel.offload == "parameters":
            seconds += work.parameters * self.state / group.ranks / (self.hardware.host.to_device_gb_s * 1e9)
        return seconds + self.links.seconds(kind, work.expert_parameters * wide, experts)

    def _copies(self, work: Work) -> float:
        """Returns the seconds of copying the parameters of a unit out of the buffer of an all-gather."""
        size = work.parameters * (self.groups["fsdp"].ranks > 1) + work.expert_parameters * (
            self.groups["efsdp"].ranks > 1
        )
        return self.copied(size)

    def copied(self, parameters: float) -> float:
        """Returns the seconds of copying parameters between FSDP2's buffers and the tensors that layers use."""
        size = parameters * self.width
        if self.host.fsdp_gb_s is not None:
            return size / (self.host.fsdp_gb_s * 1e9)
        return self.costs.moved(2 * size)

    def _replicate(self, local: float) -> float:
        size = local * self.reduce_width
        if self.parallel.compress is not None:  # two factors of `rank` columns in place of a matrix
            size *= min(1.0, 2 * self.parallel.compress.rank / self.model.hidden_size)
        return self.links.seconds("all_reduce", size, self.groups["dp_replicate"])

    def _group_after_forward(self) -> Group:
        """Returns the ranks over which backward all-gathers parameters."""
        number, fsdp = self.parallel.reshards, self.groups["fsdp"]
        few = not isinstance(number, bool) and 1 < number < fsdp.ranks
        return Group(int(number), fsdp.stride) if few else fsdp

    def _waits(self, work: Work, kind: str, passes: Passes) -> tuple[Parts, Parts]:
        """Returns seconds by axis of the collectives inside of forward and of backward."""
        forward, backward = Parts(), Parts()
        if self.mesh.tp > 1:
            size, count = work.tokens * self.model.hidden_size * self.width, {"block": 4, "head": 1}.get(kind, 1)
            seconds = count * (self.links.seconds("all_gather", size, self.groups["tp"]) + self.host.tp_us * 1e-6)
            if self.parallel.async_tp and kind == "block":
                seconds = max(seconds * (1 - ASYNC_TP), seconds - ASYNC_TP * passes.forward)
            forward["tp"] = backward["tp"] = seconds
        if kind == "block" and self.mesh.cp > 1:
            forward["cp"], backward["cp"] = self._context(work)
        if work.routed and self.mesh.ep > 1:
            size = work.routed * self.model.hidden_size * self.width
            forward["ep"] = backward["ep"] = 2 * self.links.seconds("all_to_all", size, self.groups["ep"])
        return forward, backward

    def _context(self, work: Work) -> tuple[float, float]:
        """Returns the seconds of attention's collectives over `cp` in forward and in backward."""
        heads, groups = self.shares.heads
        model, cp, group = self.model, self.mesh.cp, self.groups["cp"]
        kv = heads if model.mla is not None else groups
        keys = work.tokens * kv * (model.qk_head_dim + model.v_head_dim) * self.width  # this rank's keys and values
        method = choose_cp_method(model, self.parallel.cp_method, cp, self.mesh.tp)
        if method == "ring" and not allows_ring(model):
            method = "all_gather"
        if method == "all_to_all":
            widths = [count * dim for count in (heads, kv) for dim in (model.qk_head_dim, model.v_head_dim)]
            # One all-to-all each for queries, outputs, keys and values.
            seconds = sum(self.links.seconds("all_to_all", work.tokens * one * self.width, group) for one in widths)
            return seconds, seconds
        if method == "all_gather":
            seconds = self.links.seconds("all_gather", keys * cp, group)
            return seconds, seconds
        step, attention = self.links.seconds("send", keys, group), self.costs.attention(work.attention) / cp
        gradients = self.links.seconds("send", keys * 4 / self.width, group)  # in float32, and not beside computation
        return (cp - 1) * max(0.0, step - attention), (cp - 1) * max(0.0, step - 2.5 * attention) + cp * gradients


def compute_dtype(dtype: str, hardware: Hardware) -> str:
    """Returns the compute dtype on a device: for `auto`, bfloat16 where it is faster than float32."""
    if dtype != "auto":
        return dtype
    peaks = hardware.device.peak_tflops
    return "bfloat16" if (peaks.bfloat16 or 0) > (peaks.float32 or 0) else "float32"
