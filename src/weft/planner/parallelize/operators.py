"""Functions that run on local shards, because DTensor has no rule for them, or a slow or wrong one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from weft.planner.parallelize.torch_private import tree_map_only

Dims = Sequence[int | None]  # for each axis of the mesh, the tensor dimension that it shards; None: replicated


def run_on_shards(func: Callable, tensors: Sequence[DTensor | None], dims: Sequence[Dims], out: Dims) -> Any:
    """Calls a function on local shards. Returns its results as DTensors.

    Args:
        tensors: the tensors that the function takes, in order.
        dims: for each tensor, the dimension that each axis shards.
        out: for each axis, the dimension of the results that the axis shards.
    """
    mesh = next(tensor for tensor in tensors if tensor is not None).device_mesh
    local: list[torch.Tensor | None] = []
    for tensor, sharded in zip(tensors, dims, strict=True):
        if tensor is None:
            local.append(None)
            continue
        local.append(local_part(tensor, sharded, [dim is not None for dim in out]))
    results = [_placement(dim) for dim in out]
    wrap = partial(DTensor.from_local, device_mesh=mesh, placements=results, run_check=False)
    return tree_map_only(torch.Tensor, wrap, func(*local))


def local_part(tensor: DTensor, dims: Dims, split: Sequence[bool]) -> torch.Tensor:
    """Returns this rank's part of a tensor.

    Args:
        dims: the dimension that each axis shards.
        split: for each axis, whether its ranks compute different parts. The gradient of a tensor that all of them have
            is then the sum of the ranks' gradients.
    """
    placements = [_placement(dim) for dim in dims]
    gradients = [
        Partial() if dim is None and parts else placement
        for dim, parts, placement in zip(dims, split, placements, strict=True)
    ]
    return tensor.redistribute(placements=placements).to_local(grad_placements=gradients)


def run_on_full(func: Callable, mesh: DeviceMesh, args: Any, kwargs: Any) -> Any:
    """Calls a function on full tensors, on all ranks. Returns its results as replicated DTensors.

    A function that writes to its first argument, which is a DTensor, writes to that too.
    """
    everywhere = [Replicate()] * mesh.ndim

    def full(value: DTensor) -> torch.Tensor:
        return value.redistribute(placements=everywhere).to_local(grad_placements=everywhere)

    target = args[0] if args and isinstance(args[0], DTensor) and writes(func) else None
    local, local_kwargs = tree_map_only(DTensor, full, (args, kwargs))
    if target is None:
        wrap = partial(DTensor.from_local, device_mesh=mesh, placements=everywhere, run_check=False)
        return tree_map_only(torch.Tensor, wrap, func(*local, **local_kwargs))
    written = local[0].clone()
    func(written, *local[1:], **local_kwargs)
    new = DTensor.from_local(written, mesh, everywhere, run_check=False)
    target.copy_(new.redistribute(placements=without_sums(target)))
    return target


def writes(func: Callable) -> bool:
    """Whether a function writes to its first argument."""
    name = getattr(func, "__name__", "")
    in_place = name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    return name == "__setitem__" or in_place or (name.endswith("_") and not name.endswith("__"))


def _placement(dim: int | None) -> Placement:
    return Replicate() if dim is None else Shard(dim)


def kept(tensor: DTensor, allowed: Collection[int]) -> list[int | None]:
    """Returns the dims in which a tensor can stay sharded: those in `allowed` that their axes divide evenly."""
    found: list[int | None] = []
    left = list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        ranks = tensor.device_mesh.size(axis)
        dim = placement.dim % tensor.dim() if isinstance(placement, Shard) else None
        if dim is None or dim not in allowed or left[dim] % ranks:
            found.append(None)
            continue
        left[dim] //= ranks
        found.append(dim)
    return found


def _replicated(value: Any) -> DTensor:
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def without_sums(value: DTensor) -> list[Placement]:
    """Returns placements of a tensor in which partial sums are replicated."""
    return [placement if isinstance(placement, Shard) else Replicate() for placement in value.placements]


# ---- attention


def _attention(
    func: Callable, query: DTensor, key: DTensor, value: DTensor, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> DTensor:
    """Scaled dot-product attention: an axis shards the batch, or the heads, or nothing."""
    attn_mask = kwargs.pop("mask", attn_mask)
    rank = query.dim()
    dims = kept(query, range(rank - 2))
    for axis, dim in enumerate(dims):
        ranks = query.device_mesh.size(axis)
        others_fit = dim is not None and all(t.dim() == rank and t.shape[dim] % ranks == 0 for t in (key, value))
        if not others_fit or dim in dims[:axis]:
            dims[axis] = None
    dropout = kwargs.get("dropout_p", args[0] if args else 0.0)
    if dropout and query.device.type != "cuda":
        dims = [None] * len(dims)  # the random numbers of one device
    of_mask: list[int | None] = []
    if isinstance(attn_mask, DTensor):
        shift = rank - attn_mask.dim()
        for dim in dims:
            sharded = dim is not None and dim >= shift and attn_mask.shape[dim - shift] > 1
            of_mask.append(dim - shift if sharded and dim is not None else None)

    def call(query: Any, key: Any, value: Any, mask: Any = None) -> torch.Tensor:
        return func(query, key, value, mask, *args, **kwargs)

    return run_on_shards(call, [query, key, value, attn_mask], [dims, dims, dims, of_mask], dims)


@contextmanager
def _inner_functions(names: Mapping[str, Callable]) -> Iterator[None]:
    """Context in which functions of `torch.nn.functional` that call each other call these instead."""
    before = {name: getattr(F, name) for name in names}
    try:
        for name, function in names.items():
            setattr(F, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def _multi_head_attention(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward`, which calls attention and dropout where the mode does not see the calls."""
    names = {
        "scaled_dot_product_attention": partial(_attention, F.scaled_dot_product_attention),
        "dropout": partial(_dropout, F.dropout),
    }
    with _inner_functions(names):
        return func(*args, **kwargs)


# ---- embeddings


def _embedding(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Embedding: an axis shards the vocabulary (the result is a partial sum), or the hidden size, or the input.

    Raises:
        NotImplementedError: for `max_norm` and the like, which write to the weight or need all gradients.
    """
    bound = signature(F.embedding).bind(*args, **kwargs)
    bound.apply_defaults()
    input, weight, padding_idx, max_norm, _, by_frequency, sparse = bound.arguments.values()
    if max_norm is not None or by_frequency or sparse:
        raise NotImplementedError("an embedding with max_norm runs on full tensors")
    mesh = weight.device_mesh
    of_weight = kept(weight, [0, 1])
    if of_weight.count(0) > 1:
        of_weight = [None] * mesh.ndim
    of_input = [
        None if dim is not None else row for dim, row in zip(of_weight, kept(input, range(input.dim())), strict=True)
    ]
    ids = input.redistribute(placements=[_placement(dim) for dim in of_input]).to_local()
    partial_dims = [
        Partial() if row is not None and dim is None else _placement(dim)
        for dim, row in zip(of_weight, of_input, strict=True)
    ]
    table = weight.redistribute(placements=[_placement(dim) for dim in of_weight]).to_local(
        grad_placements=partial_dims
    )
    out: list[Placement] = [
        Partial() if dim == 0 else Shard(input.dim()) if dim == 1 else _placement(row)
        for dim, row in zip(of_weight, of_input, strict=True)
    ]
    if 0 not in of_weight:
        return DTensor.from_local(func(ids, table, padding_idx), mesh, out, run_check=False)
    local = ids - mesh.get_local_rank(of_weight.index(0)) * table.shape[0]
    absent = (local < 0) | (local >= table.shape[0])
    found = func(local.masked_fill(absent, 0), table)
    found = found.masked_fill(absent.unsqueeze(-1), 0)
    if padding_idx is not None:
        found = torch.where((ids == padding_idx % weight.shape[0]).unsqueeze(-1), found.detach(), found)
    return DTensor.from_local(found, mesh, out, run_check=False)


# ---- convolutions and functions of images


def _convolution(
    func: Callable, input: DTensor, weight: DTensor, bias: DTensor | None = None, *args: Any, **kwargs: Any
) -> DTensor:
    """Convolutions: an axis shards the batch, or the output channels (of a plain convolution), or nothing."""
    groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
    plain = not func.__name__.startswith("conv_transpose") and groups == 1
    batched = input.dim() == weight.dim()
    rows = kept(input, [0]) if batched else [None] * len(input.placements)
    channels = kept(weight, [0]) if plain and batched else [None] * len(rows)
    split = [None if row is not None else channel for row, channel in zip(rows, channels, strict=True)]
    out = [
        0 if row is not None else 1 if channel is not None else None for row, channel in zip(rows, split, strict=True)
    ]

    def call(input: Any, weight: Any, bias: Any) -> torch.Tensor:
        return func(input, weight, bias, *args, **kwargs)

    return run_on_shards(call, [input, weight, bias], [rows, split, split], out)


def _per_sample(free: int, func: Callable, input: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that compute each sample, and each of the first `free` dims, separately, such as pooling."""
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, DTensor)]
    dims = kept(input, range(min(free, input.dim() - 1)))
    if others:  # a grid for each sample, or indices of a pooling
        dims = [None] * len(dims)
        args, kwargs = tree_map_only(DTensor, lambda value: value.full_tensor(), (args, kwargs))
    return run_on_shards(lambda value: func(value, *args, **kwargs), [input], [dims], dims)


def _group_norm(
    func: Callable, input: DTensor, num_groups: int, weight: Any = None, bias: Any = None, *args: Any, **kwargs: Any
) -> DTensor:
    """Group norm: an axis shards the batch, or the channels (in full groups), or nothing."""
    dims = kept(input, [0, 1])
    groups = num_groups
    for axis, dim in enumerate(dims):
        ranks = input.device_mesh.size(axis)
        if dim == 1 and groups % ranks:
            dims[axis] = None
        elif dim == 1:
            groups //= ranks
    affine = [0 if dim == 1 else None for dim in dims]

    def call(input: Any, weight: Any, bias: Any) -> torch.Tensor:
        return func(input, groups, weight, bias, *args, **kwargs)

    return run_on_shards(call, [input, weight, bias], [dims, affine, affine], dims)


def _batch_norm(func: Callable, input: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Batch norm with the mean and variance of all rows of the batch, whichever ranks have them."""
    bound = signature(func).bind(input, *args, **kwargs)
    bound.apply_defaults()
    _, running_mean, running_var, weight, bias, training, momentum, eps = bound.arguments.values()
    dims = [dim for dim in range(input.dim()) if dim != 1]
    shape = [1, -1] + [1] * (input.dim() - 2)
    if training or running_mean is None or running_var is None:
        count = input.numel() // input.shape[1]
        mean = _replicated(input.sum(dims)) / count
        centered = input - mean.view(shape)
        variance = _replicated((centered * centered).sum(dims)) / count
        with torch.no_grad():
            for running, new in ((running_mean, mean), (running_var, variance * (count / max(count - 1, 1)))):
                if training and running is not None:
                    local = running.to_local()  # shares the memory of the buffer
                    local.lerp_(cast(DTensor, new).to_local().to(local.dtype), momentum)
    else:
        variance, centered = running_var, input - running_mean.view(shape)
    out = centered * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _mean_loss(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Losses whose mean over local elements, and not over all, DTensor's backward pass takes (PyTorch 2.13)."""
    bound = signature(func).bind(*args, **kwargs)
    if bound.arguments.get("reduction", "mean") != "mean" or bound.arguments.get("weight") is not None:
        return func(*args, **kwargs)
    bound.arguments["reduction"] = "none"
    return func(*bound.args, **bound.kwargs).mean()


# ---- random numbers


def _dropout(
    func: Callable, input: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Dropout with the mask of one device: each rank draws all of it, and uses its shard. On GPUs, DTensor draws."""
    if not training or p == 0:
        return input
    input = input.redistribute(placements=without_sums(input))
    if input.device.type == "cuda":
        return func(input, p, training)
    ones = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device).fill_(
        1
    )  # drawn in order of memory
    mask = distribute_tensor(func(ones, p, True), input.device_mesh, input.placements, src_data_rank=None)
    return input * mask


def _random(func: Callable, input: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Random tensors: each rank draws the numbers of one device, and uses its shard."""
    if input.device.type == "cuda":
        return func(input, *args, **kwargs)
    args, kwargs = tree_map_only(DTensor, lambda value: value.full_tensor(), (args, kwargs))
    drawn = func(input.full_tensor(), *args, **kwargs)
    placements = input.placements if writes(func) else without_sums(input)
    if drawn.shape != input.shape:
        placements = [Replicate()] * input.device_mesh.ndim
    new = distribute_tensor(drawn, input.device_mesh, placements, src_data_rank=None)
    return input.copy_(new) if writes(func) else new


@cache
def special_functions() -> Mapping[Callable, Callable]:
    """Returns function of PyTorch -> the function that runs instead, with the former as its first argument."""
    found: dict[Callable, Callable] = {F.scaled_dot_product_attention: _attention, F.embedding: _embedding}
    found |= {F.multi_head_attention_forward: _multi_head_attention, F.group_norm: _group_norm}
    found |= {F.batch_norm: _batch_norm, F.interpolate: partial(_per_sample, 2), F.grid_sample: partial(_per_sample, 1)}
    found |= dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout), _dropout)
    found |= dict.fromkeys((F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss), _mean_loss)
    found |= dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), _random)
    found |= dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolution)
    found |= dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _convolution)
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
        for dim in (1, 2, 3):
            for name in (f"{kind}{dim}d", f"{kind}{dim}d_with_indices"):
                functions = [getattr(module, name, None) for module in (F, torch)]
                found |= {function: partial(_per_sample, 2) for function in functions if callable(function)}
    found |= dict.fromkeys((torch.rand_like, torch.randn_like, torch.bernoulli, torch.multinomial), _random)
    in_place = ("bernoulli_", "normal_", "uniform_", "exponential_", "random_", "cauchy_", "geometric_", "log_normal_")
    found |= {getattr(torch.Tensor, name): _random for name in in_place}
    return found
