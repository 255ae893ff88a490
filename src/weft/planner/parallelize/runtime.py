"""Runs a plain module on a mesh, with DTensors, as the tables of a plan specify.

The mesh has the axes `dp`, `tp` and, in some plans, `tp2`. The rows of inputs are sharded over `dp`, parameters over
all axes. All tensors are DTensors on the mesh, so each operation computes what it computes on one device, for all
plans. Parameters are gathered over `dp` while their module runs, and again for backward (SimpleFSDP; Zhang et al.,
2024), or kept until then.

This file, and those of this package that it imports, import only PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from weft.planner.parallelize.axes import (
    OverTensor,
    over_tensor,
    placements_on,
    ranks_of,
    replicated_on,
    sharded_dims,
    with_placements,
)
from weft.planner.parallelize.containers import batch_rows, first_float, map_objects, map_tensors
from weft.planner.parallelize.functions import Functions
from weft.planner.parallelize.islands import isolate
from weft.planner.parallelize.materialize import materialize
from weft.planner.parallelize.torch_private import (
    parameters_of,
    quiet_redistribution,
    refresh_flat_weights,
    replicate_what_has_no_rule,
    storage_of,
)

Placements = Sequence[Placement]
Around = Callable[..., Any]  # (forward, *args, **kwargs) -> result


class Runtime:
    """The tables of a plan for a mesh, which `apply` carries out on a module.

    Args:
        mesh: a mesh with the axes `dp`, `tp` and `tp2`, or some of them.
        parameters: pattern of parameter names -> placement over the tensor axes; the others are replicated over them.
        inputs: pattern of module names -> placement over the tensor axes of the module's first floating-point input.
        outputs: pattern of module names -> likewise of the module's first floating-point output.
        islands: pattern of module names -> `rows` or `whole`: the module runs on plain tensors with the rank's rows, or
            with all rows. For modules with operators that DTensor cannot run, such as those with data-dependent shapes.
        recompute: patterns of names of modules whose activations are recomputed in backward.
        shard_parameters: whether parameters are sharded over `dp`; otherwise, they are replicated.
        local: `inputs`, if each data rank passes its own rows instead of all rows; and `outputs`, if it gets the
            outputs of its own rows instead of those of all rows.

    Attributes:
        reshard_after_forward: whether gathered parameters are freed after forward, and gathered again for backward.
        within: the module's forward on the mesh: takes and returns DTensors.
    """

    reshard_after_forward = True
    within: Callable[..., Any]

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        parameters: Mapping[str, OverTensor],
        inputs: Mapping[str, OverTensor],
        outputs: Mapping[str, OverTensor],
        islands: Mapping[str, str],
        recompute: Sequence[str] = (),
        shard_parameters: bool = True,
        local: Sequence[str] = (),
    ):
        self.mesh, self.dp = mesh, ranks_of(mesh, "dp")
        self.parameters, self.inputs, self.outputs, self.islands = parameters, inputs, outputs, islands
        self.recompute, self.shard_parameters, self.local = recompute, shard_parameters, local
        self.gathered: weakref.WeakKeyDictionary[torch.UntypedStorage, Any] = weakref.WeakKeyDictionary()
        self.mode = Functions(mesh, self.gather)

    def apply(
        self,
        model: nn.Module,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        without_data: bool = False,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Makes the parameters of a module DTensors, and its forward run on the mesh. Returns the module.

        Args:
            model: the module; parameters that are not on the meta device must be equal on all ranks.
            state_dict: full tensors by name that replace parameters and buffers.
            without_data: leaves tensors on the meta device where they are.
            dtype: dtype of parameters in the computation; None: their own, in which gradients are reduced.
        """
        self.mode.dtype = dtype
        quiet_redistribution()
        replicate_what_has_no_rule()
        materialize(model, self.mesh.device_type, self._stored, None if without_data else state_dict or {})
        for name, module in list(model.named_modules()):
            self._wrap(name, module)
        self.within = model.forward
        wrap(model, self._convert)
        return model

    # ---- parameters

    def _stored(self, name: str, shape: Sequence[int]) -> tuple[DeviceMesh, list[Placement]]:
        """Returns mesh and placements of a stored parameter.

        Over `dp`, it is sharded in a dimension that the tensor axes leave whole: the first that `dp` divides, or else
        the largest.
        """
        tp = match(name, self.parameters) or Replicate()
        free = [dim for dim in range(len(shape)) if dim not in sharded_dims(tp)]
        if not self.shard_parameters or not free or self.dp == 1:
            return self.mesh, placements_on(self.mesh, Replicate(), tp)
        even = [dim for dim in free if shape[dim] % self.dp == 0]
        dim = even[0] if even else max(free, key=lambda dim: shape[dim])
        return self.mesh, placements_on(self.mesh, Shard(dim), tp)

    def gather(self, parameter: Any) -> Any:
        """Returns a stored parameter, gathered over `dp`. Its gradient has the placements of the parameter."""
        if not isinstance(parameter, DTensor):
            return parameter
        full = Gather.apply(parameter, self.mode.dtype)
        if self.reshard_after_forward and full.placements != parameter.placements:
            self.gathered[storage_of(full)] = parameter.detach()
        return full

    def pack(self, tensor: torch.Tensor) -> Any:
        """Replaces a gathered parameter (or a view of one) that autograd saves by what is needed to gather it again."""
        parameter = self.gathered.get(storage_of(tensor)) if isinstance(tensor, DTensor) else None
        if parameter is None:
            return tensor
        assert isinstance(tensor, DTensor)
        with torch.no_grad():
            local = tensor.to_local()
        view = local.size(), local.stride(), local.storage_offset()
        return parameter, view, (tensor.placements, tensor.size(), tensor.stride())

    def unpack(self, packed: Any) -> torch.Tensor:
        """Returns the tensor that `pack` replaced."""
        if not isinstance(packed, tuple):
            return packed
        parameter, view, (placements, shape, strides) = packed
        with torch.no_grad():
            local = full_over_dp(parameter, self.mode.dtype).to_local().as_strided(*view)
            return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=strides)

    # ---- modules

    def _wrap(self, name: str, module: nn.Module) -> None:
        how = match(name, self.islands)
        if how is not None:
            wrap(module, lambda *args, **kwargs: isolate(self.mode, module, how, *args, **kwargs))
        elif parameters_of(module):
            wrap(module, lambda *args, **kwargs: self._with_parameters(module, *args, **kwargs))
        wrap(module, self.mode.within)  # also where a checkpointed block runs again, in backward
        inputs, outputs = match(name, self.inputs), match(name, self.outputs)
        if inputs is not None or outputs is not None:
            wrap(module, lambda *args, **kwargs: _place(inputs, outputs, *args, **kwargs))
        if any(matches(name, pattern) for pattern in self.recompute):
            wrap(module, lambda forward, *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs))

    def _with_parameters(self, module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Runs a module's forward with gathered parameters."""
        own = parameters_of(module)
        stored = dict(own)
        if not any(isinstance(parameter, DTensor) for parameter in stored.values()):
            return forward(*args, **kwargs)  # within an island, whose parameters are plain tensors
        try:
            for name, parameter in stored.items():
                own[name] = self.gather(parameter)
            refresh_flat_weights(module)
            return forward(*args, **kwargs)
        finally:
            own.update(stored)
            refresh_flat_weights(module)

    def _convert(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of the full module: shards the inputs, and gathers the outputs."""
        rows = batch_rows((args, kwargs))
        if rows is not None and "inputs" in self.local:
            rows *= self.dp
        args, kwargs = self._sharded_inputs(rows, args, kwargs)
        leave = partial(self.own_rows, rows) if "outputs" in self.local else _full
        with self.mode, torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            out = map_tensors(leave, forward(*args, **kwargs))
            map_objects(leave, out)
            return out

    def own_rows(self, rows: int | None, value: torch.Tensor) -> torch.Tensor:
        """Returns the rows of this data rank, of an output that has all rows; other outputs are gathered."""
        if not isinstance(value, DTensor) or value.dim() == 0 or value.shape[0] != rows:
            return _full(value)
        placements = placements_on(self.mesh, Shard(0), Replicate())
        return value.redistribute(placements=placements).to_local(grad_placements=placements)

    def _sharded_inputs(self, rows: int | None, args: Any, kwargs: Any) -> Any:
        local = "inputs" in self.local
        even = local or (rows is not None and rows % self.dp == 0)
        given = rows // self.dp if local and rows is not None else rows  # rows of a tensor before it is sharded

        def enter(value: torch.Tensor) -> torch.Tensor:
            if isinstance(value, DTensor):
                return value
            by_rows = even and value.dim() > 0 and value.shape[0] == given
            placements = placements_on(self.mesh, Shard(0) if by_rows else Replicate(), Replicate())
            if local:
                return DTensor.from_local(value, self.mesh, placements, run_check=False)
            whole = DTensor.from_local(value, self.mesh, replicated_on(self.mesh), run_check=False)
            return whole.redistribute(placements=placements)

        return map_tensors(enter, (args, kwargs))


class Gather(torch.autograd.Function):
    """Gathers a parameter over `dp`; its gradient is reduced to the placements of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, dtype: torch.dtype | None) -> DTensor:  # type: ignore[override]
        """Returns the parameter, replicated over `dp`, in a dtype."""
        ctx.placements, ctx.dtype = parameter.placements, parameter.dtype
        return full_over_dp(parameter, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None]:  # type: ignore[override]
        """Returns the gradient with the parameter's placements: a reduce-scatter of partial sums."""
        summed = cast(DTensor, gradient.to(ctx.dtype))
        return summed.redistribute(placements=ctx.placements), None


def full_over_dp(parameter: DTensor, dtype: torch.dtype | None = None) -> DTensor:
    """Returns a parameter, replicated over `dp`; over `tp`, it stays sharded.

    Args:
        dtype: dtype of the result, if the parameter has floating-point values; None: that of the parameter.
    """
    placements = with_placements(parameter.device_mesh, parameter.placements, {"dp": Replicate()})
    casts = dtype not in (None, parameter.dtype) and parameter.is_floating_point()
    value = parameter.to(dtype) if casts else parameter.view_as(parameter)  # cast before it is gathered: fewer bytes
    return cast(DTensor, value).redistribute(placements=placements)


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _place(inputs: OverTensor | None, outputs: OverTensor | None, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs a forward with its first floating-point input, and its first floating-point output, redistributed."""

    def placed(tensors: Any, tp: OverTensor | None) -> Any:
        first = first_float(tensors, {})
        if not isinstance(first, DTensor) or tp is None or first.dim() <= max(sharded_dims(tp), default=-1):
            return tensors
        mesh = first.device_mesh
        new = first.redistribute(placements=with_placements(mesh, first.placements, over_tensor(tp)))
        return map_tensors(lambda tensor: new if tensor is first else tensor, tensors)

    args, kwargs = placed((args, kwargs), inputs)
    return placed((forward(*args, **kwargs),), outputs)[0]


def wrap(module: nn.Module, around: Around) -> None:
    """Makes the module's forward call `around(forward, ...)`."""
    forward = module.forward

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = call


def matches(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern, whose wildcards match no dots: `h.*.mlp` has as many levels as `h.0.mlp`."""
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def match(name: str, patterns: Mapping[str, Any]) -> Any:
    """Returns the value of the last pattern that matches a name; None if none does."""
    return next((value for pattern, value in reversed(list(patterns.items())) if matches(name, pattern)), None)
