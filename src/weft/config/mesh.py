"""Defines the section `parallel`: the sizes of the mesh axes, and the settings of each axis."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field

from weft.config.model import ModelSection
from weft.config.section import Section, TextPattern
from weft.errors import UserError

MOST = (
    1 << 20
)  # ranks of an axis; a larger number is an error, for which the search of a legal mesh would take too long
UNSHARDED_SHARE = 0.25  # of the memory of a device, which unsharded gradients may take between micro-batches
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outer to inner: inner axes communicate most
Schedule = Literal[
    "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"
]
V_SHAPED = ("zbv_zero_bubble", "dualpipev")  # each rank has one stage from the front and one from the back
ONE_STAGE = ("gpipe", "1f1b")
SEVERAL_STAGES = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", *V_SHAPED)
SPLIT_BACKWARD = ("interleaved_zero_bubble", *V_SHAPED)


class CompressSection(Section):
    """Gradient compression over `dp_replicate`: replicas all-reduce low-rank factors of matrix gradients (PowerSGD)."""

    type: Literal["powersgd"] = "powersgd"
    """Method: PowerSGD, which is power iteration with error feedback."""
    rank: int = Field(4, ge=1)
    """Rank of the low-rank factors; a higher rank is more accurate, but needs more communication."""
    start_step: int = Field(1000, ge=0)
    """Number of initial steps without compression. In these steps, gradients are large and change quickly."""


class ParallelSection(Section):
    """Sizes of the mesh axes, from outer to inner (`pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`), and options.

    One axis can have the size -1, which stands for the remaining ranks. By default, this axis is `dp_shard`; to set
    another axis to -1, also set `dp_shard`.
    """

    auto: bool = False
    """Whether the planner chooses mesh, micro-batch, recomputation and schedule for the ranks of the run, as
    `weft plan` does; a resumed run on as many ranks keeps them. Other keys that are given stay as they are.
    `parallel: auto` is short for it.
    """
    hardware: str | None = None
    """Name or path of the hardware file that `auto` plans with. Default: the one of this GPU, or a generic CPU.
    """

    plan: str | None = None
    """Path of a plan for a custom model (`model.type: module:Class`), which `weft parallelize --out` wrote: `plan.py`
    or `plan.json`. It decides the mesh (`pp` x `dp_shard` x `tp`), the pipeline stages, and how parameters and tensors
    are sharded. `auto` finds such a plan for a custom model, and writes it to the run directory.
    """

    pp: int = Field(1, ge=-1, le=MOST)
    """Number of pipeline parallel ranks, each with some of the layers."""
    dp_replicate: int = Field(1, ge=-1, le=MOST)
    """Number of replicas of the sharded model (HSDP)."""
    dp_shard: int = Field(-1, ge=-1, le=MOST)
    """Number of ranks over which parameters are sharded (FSDP2)."""
    cp: int = Field(1, ge=-1, le=MOST)
    """Number of context parallel ranks, which split each sequence."""
    tp: int = Field(1, ge=-1, le=MOST)
    """Number of tensor parallel ranks, which split the matrices of each layer; includes sequence parallelism."""
    ep: int = Field(1, ge=1, le=MOST)
    """Number of expert parallel ranks. Expert parallelism adds no ranks, but uses the `dp_shard * cp` ranks: `ep` must
    divide this product.
    """

    zero_stage: Literal[1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage, which sets two keys. `1`: sets `reshard_after_forward: false` and `reduce_gradients:
    last`; `2`: sets `reshard_after_forward: false` and `reduce_gradients: every`; `3`: sets `reshard_after_forward:
    true` and `reduce_gradients: every`. Default: none; the two keys have their own defaults.
    """
    reshard_after_forward: bool | int | None = None
    """Whether all-gathered parameters are freed after forward and all-gathered again for backward. With an integer N,
    the parameters are sharded over groups of N ranks between forward and backward, so that the all-gather for backward
    runs within a group. Default: true without pipeline parallelism (`pp: 1`); false with it, because true would
    all-gather the parameters again for every micro-batch.
    """
    reduce_gradients: Literal["last", "every"] | None = None
    """When gradients are reduced over the ranks. `last`: with the last micro-batch of a step; until then, gradients are
    not sharded and need more memory. `every`: with every micro-batch. Default: `last`, if the unsharded gradients of a
    rank take at most a quarter of the memory of its device (on a CPU: of its share of the host's), otherwise `every`;
    always `last` with pipeline parallelism.
    """
    layers_per_fsdp_unit: int = Field(1, ge=1, le=MOST)
    """Number of layers in an FSDP2 unit, whose parameters are all-gathered together."""
    prefetch: int = Field(0, ge=0, le=MOST)
    """Number of FSDP2 units that are all-gathered in advance; with 0, FSDP2 decides. At least 1 on CPUs, where ranks
    otherwise wait at each all-gather, and with `ep`, because the host waits for the device in each layer with experts.
    """
    offload: Literal["none", "parameters", "optimizer"] = "none"
    """Which tensors are kept in host memory between uses. `parameters`: parameters, gradients and optimizer state;
    `optimizer`: the optimizer state only.
    """

    async_tp: bool = False
    """Whether communication over `tp` overlaps with matrix products. It needs `training.compile`, and GPUs with
    peer-to-peer memory access.
    """
    cp_method: Literal["auto", "all_to_all", "all_gather", "ring"] = "auto"
    """Communication of attention over `cp`. `all_to_all`: an all-to-all gives each rank all tokens of some heads
    (Ulysses). `all_gather`: keys and values are all-gathered. `ring`: keys and values are passed from rank to rank
    (ring attention). Ring attention requires a purely causal mask, no dropout, sinks, soft-capping or ALiBi, and on
    GPUs a 16-bit dtype and a head size that is a multiple of 8 and at most 256; otherwise `ring` falls back to
    `all_gather`. `auto`: `all_to_all` if `cp` divides both the number of query heads and the number of key/value heads
    of each tensor parallel rank, otherwise `all_gather`.
    """
    pp_schedule: Schedule = "1f1b"
    """Pipeline schedule for `pp`."""
    stages_per_rank: int | None = Field(None, ge=1, le=MOST)
    """Number of pipeline stages on each rank. Default: 1 for `gpipe` and `1f1b`, otherwise 2."""
    pp_residual: Literal["compute", "state"] = "compute"
    """Dtype in which stages send the residual stream and its gradients. `compute`: `training.dtype`, half the bytes in
    16 bits; the sum is rounded once per stage. `state`: float32 (float64 with `dtype: float64`).
    """
    stage_layers: list[int] | None = None
    """Number of layers of each pipeline stage, from first to last. Default: the stages have about equal FLOPs."""

    nccl: dict[Annotated[str, TextPattern(pattern=r"^(TORCH_)?NCCL_[A-Z0-9_]+$", words="NCCL_*")], str | int] = Field(
        default={"TORCH_NCCL_HIGH_PRIORITY": 1}
    )
    """Settings of NCCL and of PyTorch's use of it: names and values of environment variables `NCCL_*` and
    `TORCH_NCCL_*`, which are set before NCCL starts. A variable that is already set keeps its value, and the log says
    so. The default lets communication start while kernels of the computation wait, because NCCL's streams have a
    higher priority; a mapping in the file replaces the default. No effect on CPUs (docs/performance.md).
    """
    compress: CompressSection | None = None
    """Gradient compression over `dp_replicate`, for slow links between replicas. Default: none."""

    @property
    def reshards(self) -> bool | int:
        """The value of FSDP2's argument `reshard_after_forward`."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.pp == 1 if self.zero_stage is None else self.zero_stage == 3

    @property
    def reduces_every(self) -> bool:
        """Whether gradients are reduced over the ranks with every micro-batch, as far as this section says.

        With `reduces_by_memory`, it is false, and `choose_reduction` decides.
        """
        if self.reduce_gradients is not None:
            return self.reduce_gradients == "every"
        return self.zero_stage in (2, 3)

    @property
    def reduces_by_memory(self) -> bool:
        """Whether this section leaves to the memory when gradients are reduced over the ranks."""
        return self.reduce_gradients is None and self.zero_stage is None

    @property
    def virtual_stages(self) -> int:
        """Number of pipeline stages on each rank."""
        return self.stages_per_rank or (2 if self.pp_schedule in SEVERAL_STAGES else 1)

    def supports(self, micro_batches: int, pp: int) -> bool:
        """Whether PyTorch's class for the pipeline schedule supports this number of micro-batches over `pp` ranks."""
        if self.pp_schedule in ("1f1b", "dualpipev"):
            return pp == 1 or micro_batches >= pp * self.virtual_stages
        if self.pp_schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
            return micro_batches % max(1, micro_batches // pp) == 0  # equal rounds of about `pp` micro-batches
        return True


@dataclass(frozen=True)
class MeshShape:
    """The sizes of all mesh axes. The product of all sizes except `ep` is the world size."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of data parallel ranks, which process different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks over which parameters are sharded."""
        return self.dp_shard * self.cp

    @property
    def sizes(self) -> dict[str, int]:
        """Name of each axis -> its number of ranks."""
        return asdict(self)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one rank"


def least_ranks(section: ParallelSection) -> int:
    """Returns the smallest world size that fits the axes in a section."""
    known = math.prod(max(1, getattr(section, axis)) for axis in AXES)
    if -1 in (section.dp_shard, section.cp):  # `ep` divides their product
        inner = max(1, section.dp_shard) * max(1, section.cp)
        known = known // inner * math.lcm(inner, section.ep)
    return known


def launched_ranks() -> int | None:
    """Returns the world size that torchrun set; None if torchrun did not start this process."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) or None if ranks.isdigit() else None


def mesh_shape(section: ParallelSection, ranks: int) -> MeshShape:
    """Returns the mesh that a section gives for a world size. `config/legal_mesh.py` checks whether the mesh is legal.

    Args:
        ranks: the world size.

    Raises:
        UserError: a size is 0, several sizes are -1, or the product of the sizes cannot be `ranks`.
    """
    sizes = {axis: getattr(section, axis) for axis in AXES}
    for name, size in sizes.items():
        if size == 0:
            raise UserError(f"parallel.{name}: 0 ranks; set 1 to disable the axis, or -1 for the remaining ranks")
    filled = [axis for axis, size in sizes.items() if size == -1]
    if len(filled) > 1:
        names = " and ".join(filled)
        raise UserError(f"parallel: only one of {names} can be -1; set the others to 1 or another number of ranks")
    known = math.prod(max(1, size) for size in sizes.values())
    if filled:
        if ranks % known:
            product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
            product += f" = {known}" if " x " in product else ""
            raise UserError(
                f"parallel: {product} does not divide the {ranks} ranks; start a multiple of {known}, or change the "
                f"axes so that their product divides {ranks}"
            )
        sizes[filled[0]] = ranks // known
    elif known != ranks:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis.startswith("dp"))
        raise UserError(
            f"parallel: {product} = {known}, but the run has {ranks} ranks; set dp_shard: -1 to use all of them, "
            f"or start {known} ranks (--nproc {known})"
        )
    return MeshShape(**sizes, ep=section.ep)


def can_exchange_heads(heads: Iterable[int], tp: int, cp: int) -> bool:
    """Whether `cp_method: all_to_all` is possible: `cp` must divide each number of heads on a tensor parallel rank.

    Args:
        heads: the model's number of query heads, and its number of key/value heads. Each tensor parallel rank has
            1/`tp` of both, but at least 1.
    """
    return all(max(1, count // tp) % cp == 0 for count in heads)


def choose_cp_method(model: ModelSection, method: str, cp: int, tp: int) -> str:
    """Returns the communication method of attention for a value of `parallel.cp_method`.

    "auto" means all_to_all if `cp` divides the number of heads per `tp` rank, else all_gather.

    Args:
        method: a communication method or "auto".
        cp, tp: sizes of these mesh axes.
    """
    if method != "auto":
        return method
    groups = model.num_attention_heads if model.mla else model.kv_heads
    return "all_to_all" if can_exchange_heads((model.num_attention_heads, groups), tp, cp) else "all_gather"
