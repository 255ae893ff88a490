"""Custom operations (`weft.register_op`) in the graph of a module, and their trials without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import UserError
from weft.planner.parallelize.operation_hooks import captured_by
from weft.planner.parallelize.register_op import Annotation, result_problems, sizes_of

NODE = "weft.annotated.default"


@dataclass(frozen=True)
class Custom:
    """A custom operation as the target of a node.

    Attributes:
        function: what `weft.register_op` returned.
    """

    function: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the operation."""
        return self.function(*args, **kwargs)

    def __str__(self) -> str:
        return getattr(self.function, "__qualname__", "operation")


@dataclass
class _Call:
    function: Callable
    args: tuple
    kwargs: dict[str, Any]


_calls: list[_Call] = []


@torch.library.custom_op("weft::annotated", mutates_args=())
def _annotated(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Stands in a graph for a call of a custom operation."""
    raise NotImplementedError("only in graphs")


@_annotated.register_fake
def _(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    call = _calls[number]
    args = _with_tensors(call.args, tensors)
    annotation: Annotation = call.function.annotation  # type: ignore[attr-defined]
    try:
        with captured_by(None):
            found = call.function(*args, **call.kwargs)
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        if problems := result_problems(str(Custom(call.function)), annotation, results):
            raise UserError(f"register_op: {annotation.text!r}: {problems[0]}")
        return results
    except UserError:
        raise
    except Exception as error:  # the operation needs data; the annotation has the shapes
        sizes = sizes_of(str(Custom(call.function)), annotation, args) | {"1": 1}
        unknown = sorted({name for group in annotation.outputs for name in group or ("?",)} - set(sizes))
        if unknown:
            raise UserError(
                f"register_op: {Custom(call.function)} does not run without data ({type(error).__name__}), and its "
                f"annotation has no size for {unknown[0]}; use torch.library.custom_op with register_fake"
            ) from error
        like = next((one for one in tensors if one.is_floating_point()), tensors[0])
        return [like.new_empty([sizes[name] for name in group or ()]) for group in annotation.outputs]


def _with_tensors(args: Sequence[Any], tensors: Sequence[Any]) -> tuple:
    remaining = iter(tensors)
    return tuple(next(remaining) if isinstance(one, torch.Tensor) else one for one in args)


@contextmanager
def recorded_operations() -> Iterator[None]:
    """Context in which custom operations are single operations of the graph."""

    def stand_in(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        sizes_of(str(Custom(function)), function.annotation, args)  # type: ignore[attr-defined]
        _calls.append(_Call(function, args, kwargs))
        results = _annotated([one for one in args if isinstance(one, torch.Tensor)], len(_calls) - 1)
        return results[0] if len(results) == 1 else tuple(results)

    _calls.clear()
    with captured_by(stand_in):
        yield


def operation_of(number: int, tensors: Sequence[Any]) -> tuple[Custom, tuple, dict[str, Any]]:
    """Returns target and arguments of a recorded call.

    Args:
        tensors: what stands for the tensors among the positional arguments, in order.
    """
    call = _calls[number]
    return Custom(call.function), _with_tensors(call.args, tensors), call.kwargs


class _WithoutData(torch.autograd.Function):
    """Results and gradients that depend on all inputs, without data."""

    @staticmethod
    def forward(ctx: Any, shapes: Any, dtypes: Any, *inputs: Any) -> Any:  # type: ignore[override]
        """Returns tensors of the shapes."""
        ctx.save_for_backward(*(one for one in inputs if isinstance(one, torch.Tensor)))
        ctx.inputs = [one if isinstance(one, torch.Tensor) else None for one in inputs]
        return tuple(
            torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        """Returns tensors like the inputs."""
        some = [None if one is None or not one.is_floating_point() else torch.empty_like(one) for one in ctx.inputs]
        return None, None, *some


def without_data(outputs: Sequence[Any]) -> Callable:
    """Returns a function that stands for a custom operation on local tensors without data.

    Args:
        outputs: shapes and dtypes of the results of the full operation.
    """

    def call(function: Callable, annotation: Annotation, args: tuple, kwargs: dict[str, Any]) -> Any:
        sizes = sizes_of(getattr(function, "__name__", "operation"), annotation, args)
        shapes = [
            [sizes.get(name, size) for name, size in zip(group or [""] * len(meta.shape), meta.shape, strict=True)]
            for group, meta in zip(annotation.outputs, outputs, strict=True)
        ]
        found = _WithoutData.apply(shapes, [meta.dtype for meta in outputs], *args)
        return found[0] if len(found) == 1 else found

    return call
