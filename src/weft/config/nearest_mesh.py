"""The legal mesh that is the smallest change from one that is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from weft.config.mesh import AXES, MeshShape, ParallelSection

_AXES = (*AXES, "ep")
# Inner axes first: their sizes are held narrowest by the model.
_ORDER = ("tp", "cp", "pp", "dp_replicate", "dp_shard")


def nearest_mesh(
    section: ParallelSection,
    ranks: int | None,
    experts: int | None,
    alone: Callable[[str, int], bool],
    fits: Callable[[MeshShape], bool],
) -> dict[str, int] | None:
    """What to write for the axes in place of what is written.

    Near is a small sum of |log2| of the sizes' changes; of meshes that are equally near, the one that leaves more axes
    as they are written.

    Args:
        section: a mesh that is not legal.
        ranks: how many the mesh must have. None: any number; what is -1 stays so.
        experts: of the model; `ep` divides them.
        alone: whether an axis may have a size, all others left out of account.
        fits: whether a mesh is legal.

    Returns:
        Axis -> its size, 1 left out; None if there is none.
    """
    filled = next((axis for axis in _ORDER if getattr(section, axis) == -1), None)  # dp_shard is so by default
    if ranks is None and filled is None:
        ranks = math.prod(max(1, getattr(section, axis)) for axis in AXES)
    sizes = {axis: max(1, getattr(section, axis)) for axis in _AXES}
    wanted: dict[str, float] = dict(sizes)
    if filled is not None and ranks is not None:
        wanted[filled] = max(1.0, ranks / math.prod(sizes[axis] for axis in AXES))
    order = [axis for axis in _ORDER if axis != filled] + ([filled] if filled is not None else [])
    search = _Search(order, filled, ranks, experts, wanted, cache(alone), fits)
    search.go({}, ranks, 0.0)
    if search.best is None:
        return None
    found = {axis: size for axis, size in search.best.items() if size > 1}
    if filled is not None and ranks is None:
        found[filled] = -1
    return {axis: found[axis] for axis in _AXES if axis in found}


def as_yaml(mesh: dict[str, int]) -> str:
    """As it stands after `parallel:` in a file. What `dp_shard` is by default is said only if nothing else is."""
    fills = mesh.get("dp_shard", 1) == -1
    said = {axis: size for axis, size in mesh.items() if not fills or axis != "dp_shard"}
    if not said or (-1 in said.values() and "dp_shard" not in said):
        said["dp_shard"] = -1 if fills else 1
    return "{" + ", ".join(f"{axis}: {said[axis]}" for axis in _AXES if axis in said) + "}"


@dataclass
class _Search:
    """All meshes, nearest sizes first, without those that can no longer be nearer than the best so far."""

    order: Sequence[str]
    filled: str | None
    ranks: int | None
    experts: int | None
    wanted: dict[str, float]
    alone: Callable[[str, int], bool]
    fits: Callable[[MeshShape], bool]
    best: dict[str, int] | None = None
    best_key: tuple = (math.inf,)
    _sizes: dict[tuple[str, int | None], list[tuple[float, int]]] = field(default_factory=dict)

    def go(self, sizes: dict[str, int], left: int | None, distance: float) -> None:
        """Choose the size of the next axis, and of those after it."""
        axis = self.order[len(sizes)]
        last = len(sizes) == len(self.order) - 1
        if last and left is not None:
            options = [(self._far(axis, left), left)] if self.alone(axis, left) else []
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
        """Choose `ep`; then the mesh is whole."""
        fsdp, free = sizes["dp_shard"] * sizes["cp"], self.ranks is None and self.filled in ("dp_shard", "cp")
        options = [1]
        if self.experts is not None:
            options = divisors(self.experts if free else math.gcd(fsdp, self.experts))
        for far, size in sorted((self._far("ep", size), size) for size in options):
            if distance + far > self.best_key[0] + 1e-9:
                return
            for more in (1, 2) if self.ranks is None else (1,):  # what is filled has any size: try the least two
                whole = dict(sizes)
                if self.ranks is None and self.filled is not None:
                    whole[self.filled] = more * (size // math.gcd(size, fsdp) if free else 1)
                whole["ep"] = size
                key = self._key(whole, distance + far)
                if key < self.best_key and self.fits(MeshShape(**whole)):
                    self.best, self.best_key = whole, key

    def _key(self, sizes: dict[str, int], distance: float) -> tuple:
        # What data ranks share is what is most easily shared by more or by fewer of them.
        changed = [axis for axis in _AXES if sizes[axis] != self.wanted[axis] and axis not in ("dp_shard", self.filled)]
        written = [axis for axis in changed if self.wanted[axis] != 1]
        gone = sum(sizes[axis] == 1 for axis in written)
        data_ranks = sizes["dp_replicate"] * sizes["dp_shard"]
        return round(distance, 9), len(written), gone, len(changed), -data_ranks, tuple(map(sizes.get, _AXES))

    def _options(self, axis: str, left: int | None) -> list[tuple[float, int]]:
        if (axis, left) not in self._sizes:
            some = range(1, 2 * int(self.wanted[axis]) + 1) if left is None else divisors(left)
            self._sizes[axis, left] = sorted((self._far(axis, n), n) for n in some if self.alone(axis, n))
        return self._sizes[axis, left]

    def _far(self, axis: str, size: int) -> float:
        if axis == self.filled and self.ranks is None:
            return 0.0
        return abs(math.log2(size / self.wanted[axis]))


@cache
def divisors(number: int) -> list[int]:
    """All of them, the least first."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
