"""Records what a module computes: the graph of its operations, on tensors without data.

`torch.export` runs the module on tensors without data. Blocks that repeat, such as the layers of a decoder, run once:
the other blocks of the same structure return their input, and the graph counts the first one several times.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import wraps
from io import StringIO
from typing import Any

import torch
from torch import nn

from weft.errors import UserError
from weft.planner.parallelize.blocks import DiffersError, repeated_blocks, repeated_once
from weft.planner.parallelize.containers import call_of, map_tensors
from weft.planner.parallelize.custom_operations import recorded_operations
from weft.planner.parallelize.graph import DataDependentError, Graph, convert, depends_on_values
from weft.planner.parallelize.torch_private import FakeTensorMode, buffers_of, parameters_of
from weft.torch_private import tree_leaves, tree_map_only


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like another one, for use in a FakeTensorMode, without data. Its device is a CPU.

    A tensor on the meta device would not fit the tensors that a forward makes without naming a device.
    """
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def split_example(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments of example inputs (see `call_of`).

    Raises:
        UserError: there are no tensors among them.
    """
    args, kwargs = call_of(example_inputs)
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
        raise UserError(
            "example_inputs has no tensor; give the inputs of one call: a tensor, a tuple, or a dict of arguments"
        )
    return args, kwargs


def capture(module: nn.Module, example_inputs: Any, loss: Callable[..., torch.Tensor] | None = None) -> Graph:
    """Returns the graph of a module. The module and the example inputs may be on any device and are not changed.

    Args:
        loss: outputs -> loss, which each rank computes from full outputs.

    Raises:
        UserError: the module does not run with these inputs, or its operations depend on values of tensors.
    """
    args, kwargs = split_example(example_inputs)
    groups, islands = repeated_blocks(module), dict[str, str]()
    with FakeTensorMode(allow_non_fake_inputs=True), _module_without_data(module):
        args, kwargs = tree_map_only(torch.Tensor, without_data, (args, kwargs))
        while True:
            try:
                with (
                    repeated_once(module, groups) as repeats,
                    as_islands(module, islands),
                    recorded_operations(),
                    _returning_tensors(module, loss),
                ):
                    program = _export(module, args, kwargs)
                    graph = convert(program, module, repeats.used(), repeats.chained)
                    return replace(graph, islands=islands)
            except DiffersError as differs:
                groups.remove(differs.args[0])
            except DataDependentError as error:
                path = None if error.module is None else _path_of(module, error.module)
                if path is None or path in islands:
                    raise
                islands[path] = str(error)


@contextmanager
def _returning_tensors(module: nn.Module, loss: Callable[..., torch.Tensor] | None) -> Iterator[None]:
    """Context in which a module returns a tuple of the tensors in its result, of any type, or else its loss.

    Before the loss, its outputs are full tensors, as an island takes them.
    """
    before, forward = module.__dict__.get("forward"), module.forward

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[torch.Tensor] = []
        out = forward(*args, **kwargs)
        if loss is not None:
            out = loss(map_tensors(lambda one: _island(one, ""), out))
        map_tensors(found.append, out)
        return tuple(found)

    module.forward = call
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def _module_without_data(module: nn.Module) -> Iterator[None]:
    """Context in which parameters and buffers of a module have no data; tied ones stay tied."""
    before: list[tuple[dict, str, torch.Tensor]] = []
    made: dict[torch.Tensor, torch.Tensor] = {}
    for child in module.modules():
        for tensors in (parameters_of(child), buffers_of(child)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                before.append((tensors, name, tensor))  # type: ignore[arg-type]
                if tensor not in made:
                    made[tensor] = without_data(tensor)
    for tensors, name, tensor in before:
        tensors[name] = made[tensor]
    try:
        yield
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor


# ---- torch.export


def _export(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs and prints what is wrong, which the message below has
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return torch.export.export(module, args, kwargs, strict=False)
    except (UserError, DiffersError):
        raise
    except Exception as error:
        raise _explain(error, module, _inputs_text(args, kwargs)) from error
    finally:
        logging.disable(level)


_VALUES = ("data-dependent", "data dependent", "datadependent", "nonzero", "meta tensors", ".item()", "could not guard")


def _inputs_text(args: tuple, kwargs: dict[str, Any]) -> str:
    """Returns the shapes of the example inputs: `1: [2, 5], mask: [2, 5]`."""
    named = {**{str(place): one for place, one in enumerate(args, start=1)}, **kwargs}
    shapes = {
        name: ", ".join(str(list(leaf.shape)) for leaf in tree_leaves(one) if isinstance(leaf, torch.Tensor))
        for name, one in named.items()
    }
    return ", ".join(f"{name}: {text or type(named[name]).__name__}" for name, text in shapes.items())


def _explain(error: BaseException, module: nn.Module, inputs: str) -> UserError:
    """Returns an error of one line for an error of `torch.export`: what is wrong, where, and what to do."""
    where, inner = _place(error)
    text = next((line.strip() for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    if any(word in f"{type(error).__name__} {error}".lower() for word in _VALUES):
        return depends_on_values(where, inner or module)
    return UserError(
        f"{where}: {type(module).__name__} does not run with the example inputs ({inputs}): {text[:200]}; give the "
        "inputs of one call that runs on one device"
    )


def _place(error: BaseException) -> tuple[str, nn.Module | None]:
    """Returns file and line of the innermost frame outside of torch and Weft, and the innermost module there."""
    from weft import __file__ as here

    ours = (str(next(iter(torch.__path__))), here.removesuffix("__init__.py"), inspect.__file__, "<")
    where, inner = "the module", None
    chain: BaseException | None = error
    while chain is not None and where == "the module":
        for frame, line in traceback.walk_tb(chain.__traceback__):
            if frame.f_code.co_filename.startswith(ours):
                continue
            where = f"{frame.f_code.co_filename}:{line}"
            owner = frame.f_locals.get("self", next(iter(frame.f_locals.values()), None))
            inner = owner if isinstance(owner, nn.Module) else inner
        chain = chain.__cause__ or chain.__context__
    return where, inner


def _path_of(module: nn.Module, inner: nn.Module) -> str | None:
    return next((name for name, one in module.named_modules() if one is inner), None)


@torch.library.custom_op("weft::island", mutates_args=())
def _island(stream: torch.Tensor, path: str) -> torch.Tensor:
    """Stands in a graph for a module that cannot be captured."""
    return torch.empty_like(stream)


@_island.register_fake
def _(stream: torch.Tensor, path: str) -> torch.Tensor:
    return torch.empty_like(stream)


ISLAND = "weft.island.default"


@contextmanager
def as_islands(module: nn.Module, paths: Mapping[str, str]) -> Iterator[None]:
    """Context in which modules return a tensor like their first floating-point input, without computing it."""

    def standing_for(path: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            return _island(next((one for one in tensors if one.is_floating_point()), tensors[0]), path)

        return call

    before = {path: module.get_submodule(path).__dict__.get("forward") for path in paths}
    for path in paths:
        module.get_submodule(path).forward = standing_for(path)
    try:
        yield
    finally:
        for path, forward in before.items():
            if forward is None:
                del module.get_submodule(path).forward
            else:
                module.get_submodule(path).forward = forward
