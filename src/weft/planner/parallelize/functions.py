"""Lets a module's forward, which is written for plain tensors, compute with DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from weft.planner.parallelize.operators import run_on_full, special_functions, writes
from weft.planner.parallelize.torch_private import replicated, tree_leaves, tree_map_only

_NUMBERS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "equal"}
_FACTS = {"__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "requires_grad_"}
_FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full)
# What DTensor raises for a function that it cannot run. Checkpointing ends a recomputation by another type.
_REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError, LookupError, AttributeError)

# Functions whose backward pass mixes DTensors and plain tensors in PyTorch 2.13, and fails; and pooling that draws
# random numbers for each row.
_ON_FULL_TENSORS = {
    "cumprod", "cumprod_", "cummax", "cummin", "diagonal_scatter", "as_strided", "as_strided_copy",
    "as_strided_scatter", "quantile", "nanquantile", "linear_cross_entropy", "native_group_norm",
    "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d_with_indices",
}  # fmt: skip
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__"}  # with a vector, likewise


def _has_vector(args: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.dim() == 1 for one in args)


class Functions(TorchFunctionMode):
    """A mode in which functions take DTensors, plain tensors and stored parameters together.

    Plain tensors become replicated DTensors, and stored parameters are gathered. Functions for which DTensor has no
    rule, or a slow or wrong one, run on local shards.

    Args:
        mesh: the mesh of the DTensors.
        gather: stored parameter -> the parameter to compute with.

    Attributes:
        dtype: dtype of the parameters in the computation; None: their own.
    """

    def __init__(self, mesh: DeviceMesh, gather: Callable[[Any], Any] = lambda parameter: parameter):
        super().__init__()
        self.mesh, self.gather = mesh, gather
        self.dtype: torch.dtype | None = None
        self.entered = 0
        self.paused = False

    def __enter__(self) -> Functions:
        self.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered -= 1
        super().__exit__(*error)

    def within(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward` in the mode, also where it runs again in backward."""
        if self.entered:
            return forward(*args, **kwargs)
        with self:
            return forward(*args, **kwargs)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which functions do what they do without the mode."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.paused or name in _FACTS:
            return func(*args, **kwargs)
        if func in _FACTORIES:
            return self._replicated(func(*args, **kwargs))  # so that a module can write sharded values to it
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, DTensor) for leaf in leaves):
            return func(*args, **kwargs)
        if name in _NUMBERS:
            args, kwargs = tree_map_only(DTensor, lambda value: value.full_tensor(), (args, kwargs))
            return func(*args, **kwargs)
        _refuse_lost_gradient(func, args[0] if args else None, leaves)
        args, kwargs = tree_map_only(torch.Tensor, self._replicated, (args, kwargs))
        special = special_functions().get(func)
        try:
            if name in _ON_FULL_TENSORS or (name in _PRODUCTS and _has_vector(args)):
                raise NotImplementedError(name)
            out = func(*args, **kwargs) if special is None else special(func, *args, **kwargs)
        except (torch.OutOfMemoryError, torch.distributed.DistError):
            raise
        except _REFUSALS:  # an error of the module itself is raised again
            out = run_on_full(func, self.mesh, args, kwargs)
            replicated.append((name, tuple(range(self.mesh.ndim))))
        if name in _RESHAPES and out.requires_grad:
            out.register_hook(_in_recorded_layout)
        return out

    def _replicated(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            return self.gather(value) if isinstance(value, nn.Parameter) else value
        return DTensor.from_local(value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)


def _in_recorded_layout(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient whose shard is contiguous where the full tensor is said to be.

    A shard of one row can have other strides than DTensor records (PyTorch 2.13), and the backward pass of a reshape,
    which goes by the record, then fails.
    """
    if not isinstance(gradient, DTensor) or not gradient.is_contiguous():
        return gradient
    local = gradient.to_local()
    if local.is_contiguous():
        return gradient
    mesh, placements, shape, stride = gradient.device_mesh, gradient.placements, gradient.shape, gradient.stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def _refuse_lost_gradient(func: Callable, first: Any, leaves: Iterable[Any]) -> None:
    """Raises NotImplementedError for DTensors that are written into a plain tensor: their gradient would be lost."""
    plain = isinstance(first, torch.Tensor) and not isinstance(first, DTensor)
    lost = any(isinstance(leaf, DTensor) and leaf.requires_grad for leaf in leaves)
    if writes(func) and plain and lost and torch.is_grad_enabled():
        raise NotImplementedError(f"{func.__name__} writes sharded values into a plain tensor")
