"""Private names of DTensor that `weft.parallelize` uses, and the fallback for operators without a sharding rule.

`weft.torch_private` has the others. Like all files that run a plan, this one imports only PyTorch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops import utils as rules
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

COST = "redistribute_cost"
SPLIT_COST = 1e-3  # elements: a rank keeps a part of what it has

__all__ = [
    "DTensorSpec",
    "FakeTensorMode",
    "TensorMeta",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

# The private names; `weft.torch_private.NAMES` gives each of its own a reason.
NAMES = {
    "torch.distributed.tensor._sharding_prop:ShardingPropagator.propagate_op_sharding_non_cached": "lets operators "
    "without a sharding rule run on replicated tensors; PyTorch has no public hook, and backward cannot be intercepted",
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached": "shapes of the "
    "results of such an operator",
    "torch.distributed.tensor._ops.utils:redistribute_cost": "estimated on meshes with three axes, where exact costs "
    "of all rules of an operator takes minutes",
    "torch.distributed.tensor._dtensor_spec:DTensorSpec": "placements within the rules of operators",
    "torch.distributed.tensor._dtensor_spec:TensorMeta": "see DTensorSpec",
    "torch.distributed.tensor._op_schema:OpSchema": "see DTensorSpec",
    "torch.distributed.tensor._op_schema:OutputSharding": "see DTensorSpec",
    "torch.utils._pytree:tree_map": "maps nested inputs and outputs; PyTorch 2.11 has no public pytree module",
    "torch.utils._pytree:tree_flatten": "see tree_map",
    "torch.utils._pytree:tree_unflatten": "see tree_map",
    "torch.distributed.tensor._dispatch:redistribute_local_tensor": "redistributions without data or a process "
    "group, to try operators; a fake process group cannot run beside a real one",
    "torch.distributed.tensor._redistribute:redistribute_local_tensor": "see _dispatch",
    "torch.distributed.tensor._api:redistribute_local_tensor": "see _dispatch",
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset": "shapes of their results",
    "torch._subclasses.fake_tensor:FakeTensorMode": "tensors without data on a CPU, to capture a module",
    "torch._subclasses.fake_tensor:FakeTensor": "see FakeTensorMode",
    "torch.nn:Module._buffers": "see Module._parameters",
    "torch.nn:Module._parameters": "replaces a parameter while a module runs; setattr refuses tensors",
}

replicated: list[tuple[str, tuple[int, ...]]] = []  # operators that ran on replicated tensors, and over which axes
"""Grows with each new operator, shape and placement; readers count from the length it had when they began."""

propagating: list[OpSchema] = []
"""Operators whose placements DTensor is propagating, which it does with operators on tensors without data."""


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own dict of its direct parameters, in which a tensor can replace a parameter."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own dict of its direct buffers, in which a tensor can replace a buffer."""
    return module._buffers


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is one without data of a FakeTensorMode."""
    return isinstance(tensor, FakeTensor)


def mesh_without_processes(ranks: int, axis: str) -> DeviceMesh:
    """Returns a mesh of one axis on which nothing can communicate."""
    return DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=(axis,), _init_backend=False, _rank=0)


@contextmanager
def recorded_redistribution(record: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Context in which redistributions of DTensors return tensors without data, and communicate nothing.

    Args:
        record: is called with shape and dtype of the full tensor, and its placements before and after.
    """
    from torch.distributed.tensor import _api, _dispatch, _redistribute
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    def without_data(local: torch.Tensor, current: Any, target: Any, **options: Any) -> torch.Tensor:
        record(current.tensor_meta, current.placements, target.placements)
        shape, _ = compute_local_shape_and_global_offset(target.shape, target.mesh, target.placements)
        return local.new_empty(shape)

    modules: tuple[Any, ...] = (_api, _dispatch, _redistribute)
    before = [(module, module.redistribute_local_tensor) for module in modules]
    for module, _ in before:
        module.redistribute_local_tensor = without_data
    try:
        yield
    finally:
        for module, function in before:
            module.redistribute_local_tensor = function


def quiet_redistribution() -> None:
    """Silences DTensor's warning, printed by every rank, that a redistribution takes two collectives."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def replicate_what_has_no_rule() -> None:
    """Makes operators without a DTensor rule, or whose rule fails, run on replicated tensors, also in backward.

    The placements on the last mesh axis become replicated first, and those on all axes if that does not suffice. An
    operator that writes to a sharded tensor still raises.
    """
    propagate = ShardingPropagator.propagate_op_sharding_non_cached
    if hasattr(propagate, "replicates"):
        return
    _compare_sharding_rules_fast()

    @wraps(propagate)
    def with_fallback(self: Any, schema: OpSchema) -> Any:
        propagating.append(schema)
        try:
            return _checked(schema, propagate(self, schema))
        except Exception as error:  # DTensor raises many types; what no fallback can run is raised again
            found = _replicate(self, propagate, schema)
            if found is None:
                raise error
            return found
        finally:
            propagating.pop()

    with_fallback.replicates = True  # type: ignore[attr-defined]
    ShardingPropagator.propagate_op_sharding_non_cached = with_fallback  # type: ignore[assignment]


def _compare_sharding_rules_fast() -> None:
    """Makes DTensor estimate what the rules of an operator redistribute on meshes with three axes or more.

    DTensor searches the shortest way of each redistribution, for up to 1,000 rules of a matrix product: minutes for a
    decoder layer. Without a redistribution, the cost is 0 by both, so what a plan places is not moved.
    """
    search: Callable[[DTensorSpec, DTensorSpec], float] = getattr(rules, COST)

    @wraps(search)
    def estimate(current: DTensorSpec, target: DTensorSpec) -> float:
        orders = [getattr(spec, "shard_order", ()) for spec in (current, target)]  # not in PyTorch 2.11
        if current.mesh.ndim < 3 or current.mesh != target.mesh or None in orders:
            return search(current, target)
        if current.placements == target.placements:
            return search(current, target)
        size, cost = math.prod(current.shape) / current.num_shards, 0.0  # elements on a rank, and sent
        for axis, (one, other) in enumerate(zip(current.placements, target.placements, strict=True)):
            if one == other:
                continue
            if other.is_partial() and not one.is_replicate():
                return math.inf
            if one.is_partial():
                cost += size if other.is_shard() else 2 * size
            elif one.is_shard():
                size *= current.mesh.size(axis) if other.is_replicate() else 1
                cost += size
            cost += SPLIT_COST
        return cost

    setattr(rules, COST, estimate)


def _checked(schema: OpSchema, found: OutputSharding) -> OutputSharding:
    """Returns the sharding of an operator's result.

    Raises:
        NotImplementedError: the operator writes to a tensor whose placements would change. DTensor changes only the
            record of the placements, not the local tensor (`index_add_` in PyTorch 2.13).
    """
    specs = [leaf for leaf in tree_leaves(schema.args_schema, is_leaf=_is_spec) if _is_spec(leaf)]
    out = found.output_spec
    if not schema.op._schema.is_mutable or not specs or not isinstance(out, DTensorSpec):
        return found
    if out.placements != specs[0].placements and out.shape == specs[0].shape:
        raise NotImplementedError(f"{schema.op} changes placements of a tensor in place")
    return found


def _replicate(propagator: Any, propagate: Callable, schema: OpSchema) -> Any:
    """Returns the sharding of an operator's result after some or all inputs are replicated; None if that fails too."""
    leaves = tree_leaves((schema.args_schema, schema.kwargs_schema), is_leaf=_is_spec)
    specs = [leaf for leaf in leaves if _is_spec(leaf)]
    writes = specs and schema.op._schema.is_mutable
    if not specs or (writes and any(not placement.is_replicate() for placement in specs[0].placements)):
        return None
    axes = range(specs[0].mesh.ndim)
    for some in [*([axis] for axis in reversed(axes)), list(axes)]:
        changed = _with_replicated(schema, some)
        try:
            found = propagate(propagator, changed)
        except Exception:  # the next try replicates over more axes
            continue
        replicated.append((str(schema.op), tuple(some)))
        found.redistribute_schema = found.redistribute_schema or changed
        found.needs_redistribute = True
        return found
    metas = propagator._propagate_tensor_meta_non_cached(schema)
    if metas is None:
        return None
    everywhere: tuple[Placement, ...] = tuple(Replicate() for _ in axes)

    def whole(meta: Any) -> Any:
        return DTensorSpec(specs[0].mesh, everywhere, tensor_meta=meta) if isinstance(meta, TensorMeta) else None

    replicated.append((str(schema.op), tuple(axes)))
    out = whole(metas) if isinstance(metas, TensorMeta) else tuple(map(whole, metas))
    return OutputSharding(out, _with_replicated(schema, axes), needs_redistribute=True)


def _with_replicated(schema: OpSchema, axes: Iterable[int]) -> OpSchema:
    def changed(spec: DTensorSpec) -> DTensorSpec:
        placements = tuple(Replicate() if axis in axes else p for axis, p in enumerate(spec.placements))
        return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)

    both = (schema.args_schema, schema.kwargs_schema)
    args, kwargs = tree_map_only(DTensorSpec, changed, both, is_leaf=_is_spec)
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


def _is_spec(value: Any) -> bool:
    return isinstance(value, DTensorSpec)


def storage_of(tensor: DTensor) -> torch.UntypedStorage:
    """Returns the storage of a DTensor's local tensor."""
    with torch.no_grad():
        return tensor.to_local().untyped_storage()


def refresh_flat_weights(module: nn.Module) -> None:
    """Makes a recurrent module of PyTorch use the parameters that it has now, also those that were replaced."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [parameters_of(module).get(name) for name in module._flat_weights_names]


def initializer_of(model: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """Returns the function that sets the initial values of a module; None if it has none.

    That is `reset_parameters`, or `_reset_parameters` of some modules of PyTorch, or `_init_weights` of a Transformers
    model.
    """
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if own is not None:
        return own
    of_model = getattr(model, "_init_weights", None)
    return None if of_model is None else lambda: of_model(module)


def was_written(tensor: torch.Tensor) -> bool:
    """Whether an operation wrote to a tensor."""
    return tensor._version > 0
