"""Defines all uses of private names of PyTorch, each with a reason and a replacement.

`tests/test_torch_private.py` checks that no other file uses private names, and that the installed PyTorch has each name
of `NAMES`. So if a new version lacks a name, the test fails before a training step does. PyTorch 2.11 and 2.13 have all
of these names. Where PyTorch has a public name that is as fast, Weft uses the public name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "compute_local_shape_and_global_offset",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map_only",
]


class PrivateName(NamedTuple):
    """A private name of torch, which a new version can remove.

    Attributes:
        name: the name, as `module:attribute.attribute`.
        reason: what Weft uses the name for, and why no public name replaces it.
        without: what to do, or what no longer works, if PyTorch lacks the name.
    """

    name: str
    reason: str
    without: str


_FLASH = "the fused attention kernel, with its log-sum-exp and backward; the public function returns only the output"
_NO_FLASH = "document attention on CPUs and ring attention fail; use a plain softmax with its sums"
_DISPATCH = "sees each operator below autograd; the public TorchFunctionMode sees only calls above it, not backward"
_TREE = "maps nested containers like FSDP2 and checkpoint; PyTorch 2.11 has no public pytree module"

NAMES = (
    PrivateName("torch.nn:Module._parameters", "replaces a parameter with a plain tensor; setattr refuses it, and "
                "functional_call takes 10 times as long", "wrap forwards in torch.func.functional_call"),
    PrivateName("torch.nn:Module._modules", "copies a Transformers model with two children replaced, without running "
                "its constructor", "the head of a Transformers model is called by the model's forward (slower)"),
    PrivateName("torch.nn:Module._forward_hooks", "tells whether a module computes what its class says; see has_hooks",
                "no compiled decoding step"),
    PrivateName("torch.nn:Module._forward_pre_hooks", "see _forward_hooks", "no compiled decoding step"),
    PrivateName("torch.distributed.tensor:DTensor._spec", "DTensor(local, spec) takes 1/20 of the time of from_local",
                "use DTensor.from_local"),
    PrivateName("torch:Tensor._version", "tells whether a tensor was written in place", "casts of parameters are not "
                "cached between forward passes, and saved activations are not checked for writes"),
    PrivateName("torch:UntypedStorage._cdata", "the identity of a storage; data_ptr() is 0 for all empty and meta ones",
                "use data_ptr(), wrong for empty tensors"),
    PrivateName("torch._ops:OpOverload._schema", "names, arguments and mutability of an operator", "activation "
                "checkpointing by budget or selection cannot distinguish operators"),
    PrivateName("torch.ops:aten._foreach_norm", "norms of many tensors in one kernel; get_total_norm of "
                "torch.nn.utils adds them up in float32, Weft in float64", "one vector_norm per gradient"),
    PrivateName("torch.ops:aten._foreach_mul_", "scales many gradients in one kernel; "
                "clip_grads_with_norm_ divides by norm + 1e-6", "one mul_ per gradient"),
    PrivateName("torch:_C._current_graph_task_id", "tells which backward pass runs: a forward pass in it recomputes, "
                "and gradients of a single rank move at its end", "routers count recomputed tokens twice"),
    PrivateName("torch:_C._SetExcludeDispatchKeyGuard", "detaches a tensor that still counts in-place writes",
                "a write over a saved activation is not detected"),
    PrivateName("torch.utils._python_dispatch:TorchDispatchMode", _DISPATCH, "no selective or budgeted checkpointing"),
    PrivateName("torch.utils._python_dispatch:is_traceable_wrapper_subclass", "finds the plain tensors of a subclass",
                "checkpoints refuse tensor subclasses other than DTensor"),
    PrivateName("torch.utils._pytree:tree_map_only", _TREE, "write the recursion over tuples, lists and dicts"),
    PrivateName("torch.utils._pytree:tree_leaves", _TREE, "write the recursion over tuples, lists and dicts"),
    PrivateName("torch.distributed.tensor._utils:compute_local_shape_and_global_offset", "the rows of a DTensor that "
                "this rank has, for FSDP2's strided shards too", "compute it from mesh and placements"),
    PrivateName("torch.ops:aten._scaled_dot_product_flash_attention", _FLASH, _NO_FLASH),
    PrivateName("torch.ops:aten._scaled_dot_product_flash_attention_backward", _FLASH, _NO_FLASH),
    PrivateName("torch.ops:aten._scaled_dot_product_flash_attention_for_cpu", _FLASH, _NO_FLASH),
    PrivateName("torch.ops:aten._scaled_dot_product_flash_attention_for_cpu_backward", _FLASH, _NO_FLASH),
    PrivateName("torch:_weight_int8pack_mm", "multiplies bfloat16 activations by int8 weights; no public function does",
                "quantized weights are dequantized for each product (slower)"),
    PrivateName("torch:_weight_int4pack_mm_for_cpu", "see _weight_int8pack_mm", "see _weight_int8pack_mm"),
    PrivateName("torch:_convert_weight_to_int4pack_for_cpu", "see _weight_int8pack_mm", "see _weight_int8pack_mm"),
    PrivateName("torch.ops:mkldnn._linear_pointwise", "float32 products by oneDNN, where MKL has no AVX-512 kernels",
                "float32 products on AMD's processors take 2.5 times as long"),
    PrivateName("torch._inductor.config:_micro_pipeline_tp", "async tensor parallelism has no public switch",
                "parallel.async_tp is refused"),
    PrivateName("torch.distributed._symmetric_memory:enable_symm_mem_for_group", "see _micro_pipeline_tp",
                "parallel.async_tp is refused"),
    PrivateName("torch._functorch.config:activation_memory_budget", "share of activations that compiled code saves",
                "activation_checkpointing: budget-X is refused under compile"),
    PrivateName("torch._inductor.config:joint_custom_post_pass", "saves random results with a budget", "refuse "
                "dropout with a budget: backward would draw other numbers"),
    PrivateName("torch._inductor.custom_graph_pass:CustomGraphPass", "see joint_custom_post_pass", "see there"),
    PrivateName("torch._inductor.custom_graph_pass:get_hash_for_files", "see joint_custom_post_pass", "see there"),
    PrivateName("torch.distributed.tensor:_redistribute.clear_redistribute_planner_cache", "DTensor's plans refer to "
                "process groups of an earlier mesh", "a process cannot train twice on a mesh"),
    PrivateName("torch.distributed.tensor.debug:_clear_sharding_prop_cache", "see clear_redistribute_planner_cache",
                "a process cannot train twice on a mesh"),
    PrivateName("torch.testing._internal.distributed.fake_pg:FakeStore", "a process group whose other ranks do not "
                "exist", "`weft profile --structure` shows only meshes of one rank"),
    PrivateName("torch._subclasses.fake_tensor:FakeTensorMode", "runs a layer without memory, to count its saved "
                "tensors", "`weft profile --structure` shows no memory of saved tensors"),
    PrivateName("torch._C._distributed_c10d:_dump_fr_trace_json", "the last collectives of a rank that hangs; "
                "NCCL's are in _dump_nccl_trace_json", "no record of collectives beside the stacks"),
    PrivateName("torch._inductor:aoti_compile_and_package", "documented, but below a private module",
                "`weft export --to aoti` fails"),
)  # fmt: skip


def missing() -> list[str]:
    """Returns a message for each name of `NAMES` that the installed PyTorch lacks."""
    return [
        f"torch {torch.__version__} has no {one.name.replace(':', '.')}; Weft needs it: {one.reason}. Without it: "
        f"{one.without}"
        for one in NAMES
        if not _exists(one.name)
    ]


def _exists(name: str) -> bool:
    kind, _, attribute = name.partition(":")[2].partition(".")
    instances = {"Module": nn.Module(), "OpOverload": torch.ops.aten.mm.default}
    if kind == "DTensor":
        return attribute in (*DTensor.__annotations__, *getattr(DTensor, "__slots__", ()))
    if kind in instances and attribute:
        return hasattr(instances[kind], attribute)
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


# ---- tensors, parameters and operators


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's own dict of its direct parameters (`_parameters`), in which a plain tensor can replace one."""
    return module._parameters


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns a module's own dict of its direct children (`_modules`). Assigning to it replaces a child."""
    return module._modules


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Returns a DTensor with this rank's shard `local`, and the mesh and placements of `like`."""
    return DTensor(local, like._spec, requires_grad=False)


def version_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's version, which increases with each in-place write."""
    return tensor._version


def has_hooks(module: nn.Module) -> bool:
    """Whether a module's forward pass calls hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that identifies a tensor's storage as long as the storage exists."""
    return tensor.untyped_storage()._cdata


def schema_of(op: OpOverload) -> Any:
    """Returns an operator's schema: name, arguments and mutability."""
    return op._schema


def foreach_norm(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the L2 norm of each tensor."""
    return torch.ops.aten._foreach_norm(tensors)


def foreach_scale(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiplies each tensor by `factor` (a number, or a scalar tensor on the same device) in place."""
    torch.ops.aten._foreach_mul_(tensors, factor)


def backward_number() -> int | None:
    """Returns the number of the backward pass that autograd's engine is running on this thread; None: no such pass."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def detached_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached tensor that shares the version counter of `tensor`, so that in-place writes are detected."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# ---- fused attention with its log-sum-exp

flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
flash_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


# ---- products on CPUs, two of them of bfloat16 and quantized weights; None: this PyTorch lacks the kernel

multiply_int8: Any = getattr(torch, "_weight_int8pack_mm", None)  # (x, values [out, in], scale [out]) -> [rows, out]
# (x, values, group size, scales) -> [rows, out]
multiply_int4: Any = getattr(torch, "_weight_int4pack_mm_for_cpu", None)
multiply_onednn: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # (a, b, bias, "none", [], "") -> a @ b.mT


def pack_int4(integers: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts a quantized matrix to the layout that `multiply_int4` takes: packed integers, and scales with offsets.

    All offsets are 0.

    Args:
        integers: the quantized values, `[out, columns]`, from -8 to 7.
        scale: the scale of each group of columns, `[out, groups]`.
    """
    values = torch.ops.aten._convert_weight_to_int4pack_for_cpu((integers + 8).to(torch.int32), 1)
    return values, torch.stack((scale.T, torch.zeros_like(scale.T)), -1)


# ---- settings of the process


def overlap_tensor_parallel(group_name: Any) -> None:
    """Makes Inductor split the collectives of a process group, and adjacent matrix products, into chunks that overlap.

    This is asynchronous tensor parallelism.

    Raises:
        RuntimeError: if the GPUs cannot access each other's memory.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group_name)


def set_activation_budget(share: float, must_keep: Callable[[Any], bool], file: str) -> None:
    """Sets the fraction of activations that compiled code saves for backward. Affects only code that is compiled later.

    Args:
        share: fraction of the activations, from 0 to 1.
        must_keep: graph node -> whether to save its result regardless of the budget.
        file: path of the file that defines `must_keep`; its contents are part of the key of Inductor's cache.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch.utils.checkpoint import CheckpointPolicy

    class Keep(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                if node.op == "call_function" and must_keep(node):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> bytes:
            return get_hash_for_files((file,))

    torch._functorch.config.activation_memory_budget = share
    torch._inductor.config.joint_custom_post_pass = Keep() if share < 1 else None
    # PyTorch warns of in-place operations under recomputation. Backward does not use the results of Weft's operations.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def silence_redistribution() -> None:
    """Silences a warning of DTensor, printed by every rank: gathering a full tensor takes two collectives."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def forget_groups() -> None:
    """Clears DTensor's caches, which refer to process groups of an earlier mesh of this process."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    infos = getattr(_redistribute, "_gen_transform_infos", None)
    if infos is not None and hasattr(infos, "cache_clear"):
        infos.cache_clear()


@contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """Context with a fake process group of `ranks` ranks. This process is rank `rank`; collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_groups()


def recorded_collectives() -> bytes:
    """Returns the last collectives of this process, as JSON of PyTorch's flight recorder."""
    from torch._C import _distributed_c10d as c10d

    # A build with NCCL has both, of which the second has gloo's.
    dumps = (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    texts = [dump() for dump in dumps if dump is not None]
    return next((text for text in texts if b'"entries"' in text), b"")


def fake_tensors() -> AbstractContextManager[Any]:
    """Returns a context in which new tensors have a device and a shape, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def compile_package(program: torch.export.ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Compiles an exported program with AOTInductor, and writes a package (.pt2).

    Args:
        metadata: texts that a program reads from the package, in C++ by `AOTIModelPackageLoader::get_metadata`.
    """
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(program, package_path=str(path), inductor_configs={"aot_inductor.metadata": metadata})
