"""Finds the legal mesh that is closest to an illegal mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from weft.config.mesh import AXES, MeshShape, ParallelSection

_AXES = (*AXES, "ep")
# Inner axes first: the model restricts their sizes most.
_ORDER = ("tp", "cp", "pp", "dp_replicate", "dp_shard")


def nearest_mesh(
    section: ParallelSection,
    ranks: int | None,
    experts: int | None,
    allows: Callable[[str, int], bool],
    fits: Callable[[MeshShape], bool],
) -> dict[str, int] | None:
    """Returns the sizes of the legal mesh that is closest to `section`.

    The distance of two meshes is the sum of |log2(ratio)| over the sizes of all axes. Of equally close meshes, the mesh
    that changes fewer axes is chosen.

    Args:
        section: the illegal mesh.
        ranks: the world size. None: any world size is allowed, and an axis of -1 stays -1.
        experts: number of experts of the model, which `ep` must divide; None if the model has no experts.
        allows: returns whether a size of an axis is legal, regardless of the other axes.
        fits: returns whether a mesh is legal.

    Returns:
        Axis -> size, without sizes of 1; None if no mesh is legal.
    """
    filled = next((axis for axis in _ORDER if getattr(section, axis) == -1), None)  # by default dp_shard
    if ranks is None and filled is None:
        ranks = math.prod(max(1, getattr(section, axis)) for axis in AXES)
    sizes = {axis: max(1, getattr(section, axis)) for axis in _AXES}
    wanted: dict[str, float] = dict(sizes)
    if filled is not None and ranks is not None:
        wanted[filled] = max(1.0, ranks / math.prod(sizes[axis] for axis in AXES))
    order = [axis for axis in _ORDER if axis != filled] + ([filled] if filled is not None else [])
    search = _Search(order, filled, ranks, experts, wanted, cache(allows), fits)
    search.go({}, ranks, 0.0)
    if search.best is None:
        return None
    found = {axis: size for axis, size in search.best.items() if size > 1}
    if filled is not None and ranks is None:
        found[filled] = -1
    return {axis: found[axis] for axis in _AXES if axis in found}


def as_yaml(mesh: dict[str, int]) -> str:
    """Returns a mesh as the YAML value of `parallel`. `dp_shard: -1` is written only if no other axis is written."""
    fills = mesh.get("dp_shard", 1) == -1
    written = {axis: size for axis, size in mesh.items() if not fills or axis != "dp_shard"}
    if not written or (-1 in written.values() and "dp_shard" not in written):
        written["dp_shard"] = -1 if fills else 1
    return "{" + ", ".join(f"{axis}: {written[axis]}" for axis in _AXES if axis in written) + "}"


@dataclass
class _Search:
    """A branch-and-bound search for the legal mesh that is closest to the sizes in `wanted`.

    Attributes:
        order: the axes except `ep`, in the order in which their sizes are chosen.
        filled: the axis of size -1, which takes the remaining ranks; None if there is none.
        wanted: axis -> size in the illegal mesh.
        ranks, experts, allows, fits: as in `nearest_mesh`.
        best: axis -> size in the best mesh found so far.
        best_key: sort key of `best`, which begins with the distance; a smaller key is better.
    """

    order: Sequence[str]
    filled: str | None
    ranks: int | None
    experts: int | None
    wanted: dict[str, float]
    allows: Callable[[str, int], bool]
    fits: Callable[[MeshShape], bool]
    best: dict[str, int] | None = None
    best_key: tuple = (math.inf,)
    _sizes: dict[tuple[str, int | None], list[tuple[float, int]]] = field(default_factory=dict)

    def go(self, sizes: dict[str, int], left: int | None, distance: float) -> None:
        """Tries all sizes of the next axis, and recursively of the axes after it.

        Args:
            sizes: sizes of the axes that are already chosen.
            left: number of ranks that are left for the other axes; None if any world size is allowed.
            distance: sum of the distances of the chosen sizes.
        """
        axis = self.order[len(sizes)]
        last = len(sizes) == len(self.order) - 1
        if last and left is not None:
            options = [(self._far(axis, left), left)] if self.allows(axis, left) else []
        elif last:
            options = [(0.0, 1)]
        else:
            options = self._options(axis, left)
        for far, size in options:
            if distance + far > self.best_key[0] + 1e-9:
                return
            chosen = {**sizes, axis: size}
            if last:
                self._experts(chosen, distance + far)
            else:
                self.go(chosen, None if left is None else left // size, distance + far)

    def _experts(self, sizes: dict[str, int], distance: float) -> None:
        """Tries all sizes of `ep`, which completes the mesh."""
        fsdp, free = sizes["dp_shard"] * sizes["cp"], self.ranks is None and self.filled in ("dp_shard", "cp")
        options = [1]
        if self.experts is not None:
            options = divisors(self.experts if free else math.gcd(fsdp, self.experts))
        for far, size in sorted((self._far("ep", size), size) for size in options):
            if distance + far > self.best_key[0] + 1e-9:
                return
            for more in (1, 2) if self.ranks is None else (1,):  # an axis of -1 can have any size: try the two smallest
                chosen = dict(sizes)
                if self.ranks is None and self.filled is not None:
                    chosen[self.filled] = more * (size // math.gcd(size, fsdp) if free else 1)
                chosen["ep"] = size
                key = self._key(chosen, distance + far)
                if key < self.best_key and self.fits(MeshShape(**chosen)):
                    self.best, self.best_key = chosen, key

    def _key(self, sizes: dict[str, int], distance: float) -> tuple:
        # A change of dp_shard is the easiest, so it does not count.
        changed = [axis for axis in _AXES if sizes[axis] != self.wanted[axis] and axis not in ("dp_shard", self.filled)]
        written = [axis for axis in changed if self.wanted[axis] != 1]
        gone = sum(sizes[axis] == 1 for axis in written)
        data_ranks = sizes["dp_replicate"] * sizes["dp_shard"]
        return round(distance, 9), len(written), gone, len(changed), -data_ranks, tuple(map(sizes.get, _AXES))

    def _options(self, axis: str, left: int | None) -> list[tuple[float, int]]:
        if (axis, left) not in self._sizes:
            some = range(1, 2 * int(self.wanted[axis]) + 1) if left is None else divisors(left)
            self._sizes[axis, left] = sorted((self._far(axis, n), n) for n in some if self.allows(axis, n))
        return self._sizes[axis, left]

    def _far(self, axis: str, size: int) -> float:
        if axis == self.filled and self.ranks is None:
            return 0.0
        return abs(math.log2(size / self.wanted[axis]))


@cache
def divisors(number: int) -> list[int]:
    """Returns all divisors of a number in increasing order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
