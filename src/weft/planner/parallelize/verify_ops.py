"""Tries the annotations of the custom operations (`weft.register_op`) that a module calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.errors import UserError
from weft.planner.parallelize.containers import call_of
from weft.planner.parallelize.register_op import sizes_of, wrong_splits
from weft.planner.parallelize.verify import fewer_rows, module_in_float64


@dataclass
class Report:
    """What trials of an operation showed.

    Attributes:
        problems: what is wrong, as `wrong_splits` returns it.
        untried: names of dimensions that can be split, of which all calls have one.
    """

    problems: list[str] = field(default_factory=list)
    untried: set[str] = field(default_factory=set)


class _Calls(TorchFunctionMode):
    """Records the calls of annotated operations, one for each operation and shapes of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[Callable, Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if hasattr(func, "annotation"):
            shapes = tuple(tuple(one.shape) if isinstance(one, torch.Tensor) else repr(one) for one in args)
            kept = tuple(one.detach().clone() if isinstance(one, torch.Tensor) else one for one in args)
            self.found.setdefault((func, shapes), (func, kept, kwargs))
        return func(*args, **kwargs)


def verify_operations(module: nn.Module | Callable[[], nn.Module], example_inputs: Any) -> dict[str, Report]:
    """Runs a module on the CPU in float64, and tries the annotation of each custom operation that it calls.

    Args:
        module: the module or a function that returns it; parameters on the meta device get random values.
        example_inputs: inputs of one call, as for `parallelize`; two rows of the batch are used.

    Returns:
        Name and annotation of each operation -> what trials of its calls showed.

    Raises:
        UserError: the module calls no registered operation, or does not run.
    """
    args, kwargs = fewer_rows(1, call_of(example_inputs))
    model = module_in_float64(module)
    calls = _Calls()
    try:
        with torch.no_grad(), calls:
            model(*args, **kwargs)
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{type(model).__name__} does not run on the CPU in float64: {what}") from error
    if not calls.found:
        raise UserError(
            f"{type(model).__name__} calls no operation of weft.register_op with these inputs; decorate the operation"
        )
    report: dict[str, Report] = {}
    with torch.no_grad():
        for function, given, named in calls.found.values():
            name, annotation = function.__name__, function.annotation
            sizes = sizes_of(name, annotation, given)
            untried = {dim for dim in annotation.split | annotation.summed if sizes[dim] < 2}
            about = report.setdefault(f"{name}, {annotation.text!r}", Report(untried=untried))
            about.untried &= untried
            about.problems += [line for line in wrong_splits(function, *given, **named) if line not in about.problems]
    return report
