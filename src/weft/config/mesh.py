"""`parallel:` how many ranks each way of sharing the work gets."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import Field

from weft.config.section import Section
from weft.errors import UserError

MOST = 1 << 20  # ranks of an axis: more is a slip, and looking for a legal mesh near it would take for ever
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outer to inner: neighbours talk most
Schedule = Literal[
    "gpipe", "1f1b", "looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"
]
V_SHAPED = ("zbv_zero_bubble", "dualpipev")  # a rank has one stage from each end
ONE_STAGE = ("gpipe", "1f1b")
SEVERAL_STAGES = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", *V_SHAPED)
SPLIT_BACKWARD = ("interleaved_zero_bubble", *V_SHAPED)


class CompressSection(Section):
    """Copies (`dp_replicate`) tell one another factors of low rank in place of the gradients of matrices."""

    type: Literal["powersgd"] = Field("powersgd", description="power iteration with error feedback")
    rank: int = Field(4, ge=1, description="of what is told of a matrix; bytes grow with it, and so does fidelity")
    start_step: int = Field(
        1000, ge=0, description="so many steps are exact before: their gradients are large, and change quickly"
    )


class ParallelSection(Section):
    """Sizes of the mesh axes, outer to inner. One of them may be -1: what is left of the ranks."""

    pp: int = Field(1, ge=-1, le=MOST, description="pipeline stages' ranks: each has some of the layers")
    dp_replicate: int = Field(1, ge=-1, le=MOST, description="copies of the sharded model (HSDP)")
    dp_shard: int = Field(-1, ge=-1, le=MOST, description="ranks that share one copy of the parameters (FSDP2)")
    cp: int = Field(1, ge=-1, le=MOST, description="ranks that share each sequence (context parallel)")
    tp: int = Field(1, ge=-1, le=MOST, description="ranks that share each layer's matrices (with sequence parallel)")
    ep: int = Field(1, ge=1, le=MOST, description="ranks that share the experts, taken from dp_shard x cp")

    zero_stage: Literal[1, 2, 3] | None = Field(
        None,
        description="DeepSpeed's words for the next two. 1: parameters are gathered and gradients reduced once; "
        "2: gradients are reduced with every micro-batch; 3: and parameters are gathered anew for backward. Default: "
        "as 3, with gradients reduced once",
    )
    reshard_after_forward: bool | int | None = Field(
        None,
        description="free gathered parameters between forward and backward; a number: keep them cut over so many "
        "ranks. Default: true; with pp false, whose micro-batches would each have a stage gathered anew",
    )
    reduce_gradients: Literal["last", "every"] | None = Field(
        None,
        description="sum gradients over the ranks with the last micro-batch alone, which keeps them whole in between, "
        "or with every one. Default: last",
    )
    layers_per_fsdp_unit: int = Field(1, ge=1, le=MOST, description="layers that are gathered together (FSDP2)")
    prefetch: int = Field(0, ge=0, le=MOST, description="units gathered ahead of need; 0: as PyTorch does by itself")
    offload: Literal["none", "parameters", "optimizer"] = Field(
        "none", description="what lives on the host between uses: parameters with all their state, or the optimizer's"
    )

    async_tp: bool = Field(
        False,
        description="tp: overlap gathering and summing with matrix products; needs training.compile, and GPUs that "
        "reach one another's memory",
    )
    cp_method: Literal["auto", "all_to_all", "all_gather", "ring"] = Field(
        "auto",
        description="cp: exchange heads for tokens (Ulysses), gather keys and values, or pass them round where "
        "causality is all that hides keys. auto: the first, where a tensor rank's heads divide by cp, else the second",
    )
    pp_schedule: Schedule = Field("1f1b", description="pp: the order of forwards and backwards")
    stages_per_rank: int | None = Field(
        None, ge=1, le=MOST, description="pp: default: 2 for schedules with several stages a rank, 1 for the others"
    )
    stage_layers: list[int] | None = Field(
        None, description="pp: layers of each stage, first to last; default: balanced by what they cost"
    )

    compress: CompressSection | None = Field(
        None, description="dp_replicate: approximate gradients for slow links between copies; default: exact ones"
    )

    @property
    def reshards(self) -> bool | int:
        """What FSDP2 is told as `reshard_after_forward`."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.pp == 1 if self.zero_stage is None else self.zero_stage == 3

    @property
    def reduces_every(self) -> bool:
        """Whether each micro-batch's gradients are summed over the ranks."""
        if self.reduce_gradients is not None:
            return self.reduce_gradients == "every"
        return self.zero_stage in (2, 3)

    @property
    def virtual_stages(self) -> int:
        """Stages on each pipeline rank."""
        return self.stages_per_rank or (2 if self.pp_schedule in SEVERAL_STAGES else 1)

    def orders(self, micro_batches: int, pp: int) -> bool:
        """Whether the schedule can order so many micro-batches a step over `pp` ranks: PyTorch's own conditions."""
        if self.pp_schedule in ("1f1b", "dualpipev"):
            return pp == 1 or micro_batches >= pp * self.virtual_stages
        if self.pp_schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
            return micro_batches % max(1, micro_batches // pp) == 0  # equal rounds of about `pp`
        return True


@dataclass(frozen=True)
class MeshShape:
    """The sizes of all axes; the product of all but `ep` is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.dp_shard * self.cp

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> ranks."""
        return asdict(self)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one rank"


def least_ranks(section: ParallelSection) -> int:
    """The smallest number of ranks that a mesh can be of."""
    known = math.prod(max(1, getattr(section, axis)) for axis in AXES)
    if -1 in (section.dp_shard, section.cp):  # experts' ranks are taken from these
        inner = max(1, section.dp_shard) * max(1, section.cp)
        known = known // inner * math.lcm(inner, section.ep)
    return known


def launched_ranks() -> int | None:
    """Ranks as torchrun says; None if it started none."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) or None if ranks.isdigit() else None


def mesh_shape(section: ParallelSection, ranks: int) -> MeshShape:
    """The mesh that `section` means on `ranks` ranks; whether it is legal is asked in `config/legal_mesh.py`.

    Raises:
        UserError: sizes that do not multiply to `ranks`.
    """
    sizes = {axis: getattr(section, axis) for axis in AXES}
    for name, size in sizes.items():
        if size == 0:
            raise UserError(f"parallel.{name}: 0 ranks; use 1 for an axis that is not wanted, or -1 to fill it")
    filled = [axis for axis, size in sizes.items() if size == -1]
    if len(filled) > 1:
        raise UserError(
            f"parallel: only one of {' and '.join(filled)} can be -1; set the others, for example {filled[0]}: 1"
        )
    known = math.prod(max(1, size) for size in sizes.values())
    if filled:
        if ranks % known:
            raise UserError(
                f"parallel: {known} does not divide the {ranks} ranks; start a multiple of {known}, or make the axes "
                f"that are set multiply to a divisor of {ranks}"
            )
        sizes[filled[0]] = ranks // known
    elif known != ranks:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis.startswith("dp"))
        raise UserError(
            f"parallel: {product} = {known}, but there are {ranks}; set dp_shard: -1 to fill, or start {known} "
            f"(--nproc {known})"
        )
    return MeshShape(**sizes, ep=section.ep)


def exchangeable(heads: Iterable[int], tp: int, cp: int) -> bool:
    """Whether context ranks can share out what a tensor rank has of so many heads: of each kind one at least."""
    return all(max(1, count // tp) % cp == 0 for count in heads)
