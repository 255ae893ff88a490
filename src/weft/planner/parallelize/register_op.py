"""Custom operations with annotations of how they can be split (`weft.register_op`).

The notation is that of nnScaler (Lin et al., 2024): one group of dimensions for each tensor, separated by commas, and
results after `->`, as in "b l d^, n^ d^, b l -> b l n^". Dimensions of one name are split together:

| mark | a dimension that |
| --- | --- |
| `b` | can be split: parts of the inputs give the same part of the results |
| `d^` | cannot be split |
| `k+` | can be split, and the results of the parts are summed |
| `(h d)` | is made of several; the first can be split |
| `?` | stands for an argument that is no tensor, or a tensor that every part needs in full |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.overrides import handle_torch_function, has_torch_function

from weft.errors import UserError
from weft.planner.parallelize.axes import replicated_on
from weft.planner.parallelize.operation_hooks import hooks
from weft.planner.parallelize.operators import local_part

Function = TypeVar("Function", bound=Callable[..., Any])
Group = tuple[str, ...] | None  # the name of each dimension of a tensor; None for `?`


@dataclass(frozen=True)
class Annotation:
    """How an operation can be split.

    Attributes:
        inputs, outputs: the names of the dimensions of each tensor.
        split: names of dimensions that can be split.
        summed: names of dimensions that can be split, and whose parts give results to sum.
        text: the annotation as it was written.
    """

    inputs: tuple[Group, ...]
    outputs: tuple[Group, ...]
    split: frozenset[str]
    summed: frozenset[str]
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Reads the notation. Raises UserError if it is not valid."""
        left, arrow, right = text.partition("->")
        marks: dict[str, str] = {}
        if not arrow or "->" in right:
            raise UserError(f"register_op: {text!r} needs one '->' between inputs and results, as in 'b d^, d^ -> b'")
        inputs, outputs = (tuple(_group(part, marks, text) for part in side.split(",")) for side in (left, right))
        found = {name for group in inputs for name in group or ()}
        for name in {name for group in outputs for name in group or ()} - found - {"1"}:
            marks[name] = "^"  # a dimension that the operation makes
        results = {name for group in outputs for name in group or ()}
        split = frozenset(name for name in found if marks[name] == "" and name in results and name != "1")
        summed = frozenset(name for name, mark in marks.items() if mark == "+")
        if wrong := sorted(summed & results):
            raise UserError(f"register_op: {text!r}: {wrong[0]}+ is summed, so it cannot be a dimension of a result")
        if lost := sorted(name for name in found - results - summed if marks[name] == "" and name != "1"):
            raise UserError(
                f"register_op: {text!r}: {lost[0]} is not in a result; mark it {lost[0]}+ (parts are summed) or "
                f"{lost[0]}^ (not split)"
            )
        return cls(inputs, outputs, split, summed, text)

    def places(self, name: str, groups: Sequence[Group]) -> list[int | None]:
        """Returns the dimension of a name in each group; None where it is missing."""
        return [group.index(name) if group is not None and name in group else None for group in groups]


def _group(text: str, marks: dict[str, str], whole: str) -> Group:
    if text.strip() == "?":
        return None
    found, words = [], text.replace("(", " ( ").replace(")", " ) ").split()
    inner: list[str] | None = None
    for word in words:
        if word == "(" and inner is None:
            inner = []
        elif word == ")" and inner:
            found.append(inner[0])
            inner = None
        else:
            name = word.rstrip("^+")
            mark = word[len(name) :]
            if not (name.isidentifier() or name == "1") or len(mark) > 1:
                raise UserError(
                    f"register_op: {whole!r}: {word!r} is no dimension; write a name, with ^ or + behind it"
                )
            if marks.setdefault(name, mark) != mark and name != "1":
                raise UserError(f"register_op: {whole!r}: {name} has two marks; write the same one everywhere")
            (found if inner is None else inner).append(name)
            if inner is not None and len(inner) > 1 and not mark:
                marks[name] = "^"  # of a dimension made of several, only the first can be split
    if inner is not None:
        raise UserError(f"register_op: {whole!r} has a parenthesis that is not closed")
    return tuple(found)


def register_op(annotation: str) -> Callable[[Function], Function]:
    """Returns a decorator that says how an operation can be split over devices, for `weft.parallelize`.

    Without it, what DTensor cannot split runs on full tensors on every device.

    >>> @weft.register_op("b l d^, n^ d^ -> b l n^")
    ... def project(x, weight): ...

    The operation is a plain function, one of `torch.library.custom_op`, or the `apply` of an autograd function. It must
    be called by the name that the decorator returns. Positional arguments are those of the annotation; keyword
    arguments are passed as they are.

    Raises:
        UserError: the annotation is not valid.
    """
    found = Annotation.parse(annotation)

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if hooks.capture is not None:
                return hooks.capture(call, args, kwargs)
            tensors = tuple(one for one in args if isinstance(one, torch.Tensor))
            if has_torch_function(tensors):
                return handle_torch_function(call, tensors, *args, **kwargs)
            if any(isinstance(one, DTensor) for one in args):
                return split_call(function, found, args, kwargs)
            return function(*args, **kwargs)

        call.annotation = found  # pyright: ignore[reportAttributeAccessIssue]
        return call  # pyright: ignore[reportReturnType]

    return decorate


def split_call(function: Callable, annotation: Annotation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls an operation on this rank's parts of DTensors, and returns DTensors.

    On each mesh axis, the dimension is split that most bytes of the inputs are split along already and that the axis
    divides; otherwise the inputs are gathered on that axis.

    Raises:
        UserError: there are other arguments, or tensors have other dimensions, than the annotation says.
    """
    name = getattr(function, "__name__", "operation")
    sizes = sizes_of(name, annotation, args)
    mesh: DeviceMesh = next(one.device_mesh for one in args if isinstance(one, DTensor))
    chosen = _choose(annotation, args, sizes, mesh)
    local = [_part(value, group, chosen, mesh) for value, group in zip(args, annotation.inputs, strict=True)]
    results = hooks.run(function, annotation, tuple(local), kwargs)
    single = isinstance(results, torch.Tensor)
    found = (results,) if single else tuple(results)
    if len(found) != len(annotation.outputs):
        raise UserError(
            f"register_op: {name} returns {len(found)} results, but its annotation {len(annotation.outputs)}"
        )
    wrapped = [
        DTensor.from_local(result, mesh, _result_placements(group, chosen, annotation), run_check=False)
        if isinstance(result, torch.Tensor)
        else result
        for result, group in zip(found, annotation.outputs, strict=True)
    ]
    return wrapped[0] if single else type(results)(wrapped)


def sizes_of(name: str, annotation: Annotation, args: Sequence[Any]) -> dict[str, int]:
    """Returns the size of each dimension of the annotation, in a call of the operation `name`.

    Raises:
        UserError: there are other arguments, or tensors have other dimensions, than the annotation says.
    """
    if len(args) != len(annotation.inputs):
        raise UserError(f"register_op: {name} has {len(args)} arguments, but its annotation {len(annotation.inputs)}")
    sizes: dict[str, int] = {}
    for place, (value, group) in enumerate(zip(args, annotation.inputs, strict=True), 1):
        if group is None or not isinstance(value, torch.Tensor):
            continue
        if value.dim() != len(group):
            said = f"the annotation says {len(group)} ({' '.join(group)})"
            raise UserError(f"register_op: {name}: argument {place} has {value.dim()} dimensions, but {said}")
        for dim, size in zip(group, value.shape, strict=True):
            sizes[dim] = size
    return sizes


def _choose(annotation: Annotation, args: Sequence[Any], sizes: dict[str, int], mesh: DeviceMesh) -> list[str | None]:
    """Returns the name of the dimension that each mesh axis splits; None: none."""
    chosen: list[str | None] = []
    for axis in range(mesh.ndim):
        votes: dict[str, int] = {}
        for value, group in zip(args, annotation.inputs, strict=True):
            if isinstance(value, DTensor) and group is not None:
                placement = value.placements[axis]
                if isinstance(placement, Shard) and group[placement.dim] in annotation.split | annotation.summed:
                    votes[group[placement.dim]] = votes.get(group[placement.dim], 0) + value.numel()
        possible = {
            name: count for name, count in votes.items() if name not in chosen and sizes[name] % mesh.size(axis) == 0
        }
        chosen.append(max(possible, key=lambda name: (possible[name], name)) if possible else None)
    return chosen


def _part(value: Any, group: Group, chosen: Sequence[str | None], mesh: DeviceMesh) -> Any:
    """Returns this rank's part of an argument."""
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, replicated_on(mesh), run_check=False)
    return local_part(value, _dims(group, chosen), [name is not None for name in chosen])


def _dims(group: Group, chosen: Sequence[str | None]) -> list[int | None]:
    """Returns the dimension of a tensor that each mesh axis splits."""
    return [group.index(name) if group is not None and name in group else None for name in chosen]


def _result_placements(group: Group, chosen: Sequence[str | None], annotation: Annotation) -> list[Placement]:
    return [
        Shard(dim) if dim is not None else Partial() if name in annotation.summed else Replicate()
        for dim, name in zip(_dims(group, chosen), chosen, strict=True)
    ]


def wrong_splits(operation: Callable, *args: Any, parts: int = 2, **kwargs: Any) -> list[str]:
    """Tries every dimension that the annotation of an operation allows to split, and returns what is wrong.

    Args:
        operation: what `register_op` returned.
        args: example inputs, in float64 for a sharp comparison.
        parts: into how many parts each dimension is cut. Smaller dimensions are not tried.

    Returns:
        One line for each dimension whose parts do not give the results of the whole, with what does; none if all do.

    Raises:
        UserError: the operation has no annotation, or an annotation for other arguments.
    """
    annotation: Annotation | None = getattr(operation, "annotation", None)
    called = getattr(operation, "__name__", str(operation))
    if annotation is None:
        raise UserError(f"{called} has no annotation; decorate it with weft.register_op")
    sizes = sizes_of(called, annotation, args)
    whole = _results(operation(*args, **kwargs))
    problems = result_problems(called, annotation, whole)
    if problems:
        return problems
    for name in sorted(annotation.split | annotation.summed):
        places = annotation.places(name, annotation.inputs)
        if sizes[name] < parts:
            continue
        pieces = []
        try:
            for part in range(parts):
                cut = [
                    value if dim is None else value.tensor_split(parts, dim)[part]
                    for value, dim in zip(args, places, strict=True)
                ]
                pieces.append(_results(operation(*cut, **kwargs)))
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            problems.append(f"{name}: fails on a part ({' '.join(str(error).split())}); write {name}^")
            continue
        if not _equal(whole, pieces, annotation, name):
            problems.append(f"{name}: {_proposal(whole, pieces, annotation, name)}")
    return problems


def result_problems(called: str, annotation: Annotation, whole: Sequence[torch.Tensor]) -> list[str]:
    """Returns how numbers of results and of their dimensions differ from an annotation; an empty list if they agree."""
    if len(whole) != len(annotation.outputs):
        return [f"{called} returns {len(whole)} results, but the annotation has {len(annotation.outputs)}"]
    return [
        f"result {place} has {result.dim()} dimensions, but the annotation says {len(group)} ({' '.join(group)})"
        for place, (result, group) in enumerate(zip(whole, annotation.outputs, strict=True), 1)
        if group is not None and result.dim() != len(group)
    ]


def _results(found: Any) -> tuple[torch.Tensor, ...]:
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def _joined(pieces: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    return torch.stack(pieces).sum(0) if dim is None else torch.cat(pieces, dim)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=1e-8)


def _equal(whole: Sequence[torch.Tensor], pieces: list[Any], annotation: Annotation, name: str) -> bool:
    dims = annotation.places(name, annotation.outputs)
    for at, (result, dim) in enumerate(zip(whole, dims, strict=True)):
        mine = [one[at] for one in pieces]
        if dim is None and name not in annotation.summed:
            if not all(_close(result, one) for one in mine):
                return False
        elif not _close(result, _joined(mine, dim)):
            return False
    return True


def _proposal(whole: Sequence[torch.Tensor], pieces: list[Any], annotation: Annotation, name: str) -> str:
    result, mine = whole[0], [one[0] for one in pieces]
    same_shape = all(one.shape == result.shape for one in mine)
    if same_shape and _close(result, _joined(mine, None)):
        return f"parts give results to sum; write {name}+"
    fits = [dim for dim in range(result.dim()) if _close(result, torch.cat(mine, dim))]
    if fits:
        return f"parts give parts of dimension {fits[0]} of the result; write {name} there"
    return f"parts do not give the results of the whole; write {name}^"
