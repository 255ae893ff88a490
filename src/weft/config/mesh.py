"""`parallel:` how many ranks each way of sharing the work gets, and which meshes are legal."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from weft.config.errors import UserError
from weft.config.section import Section


class ParallelSection(Section):
    """Sizes of the mesh axes, outer to inner. One of them may be -1: what is left of the ranks."""

    dp_replicate: int = Field(1, ge=-1, description="copies of the sharded model (HSDP)")
    dp_shard: int = Field(-1, ge=-1, description="ranks that share one copy of the parameters (FSDP2)")
    reshard_after_forward: bool = Field(True, description="free gathered parameters between forward and backward")


@dataclass(frozen=True)
class MeshShape:
    """The sizes of all axes; their product is the number of ranks."""

    dp_replicate: int
    dp_shard: int

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.dp_replicate * self.dp_shard


def mesh_shape(section: ParallelSection, ranks: int) -> MeshShape:
    """The legal mesh that `section` means on `ranks` ranks.

    Raises:
        UserError: sizes that do not multiply to `ranks`, with the nearest legal choice.
    """
    replicate, shard = section.dp_replicate, section.dp_shard
    for name, size in (("dp_replicate", replicate), ("dp_shard", shard)):
        if size == 0:
            raise UserError(f"parallel.{name}: 0 ranks; use 1 for an axis that is not wanted, or -1 to fill it")
    if replicate == -1 and shard == -1:
        raise UserError(
            "parallel: only one of dp_replicate and dp_shard can be -1; set the other, for example dp_replicate: 1"
        )
    known = shard if replicate == -1 else replicate
    if replicate == -1 or shard == -1:
        if ranks % known:
            raise UserError(
                f"parallel: {known} does not divide the {ranks} ranks; start a multiple of {known}, or set "
                f"{'dp_shard' if replicate == -1 else 'dp_replicate'} to a divisor of {ranks}"
            )
        replicate, shard = (ranks // shard, shard) if replicate == -1 else (replicate, ranks // replicate)
    if replicate * shard != ranks:
        raise UserError(
            f"parallel: dp_replicate {replicate} x dp_shard {shard} = {replicate * shard}, but there are {ranks}; "
            f"set dp_shard: -1 to fill, or start {replicate * shard} (--nproc {replicate * shard})"
        )
    return MeshShape(replicate, shard)
