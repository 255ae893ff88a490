"""Exports models to Apache TVM: a shared library that TVM's virtual machine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.errors import UserError
from weft.export.graph import new_graph_folder, open_graph, write_weights
from weft.export.lowering import lowering
from weft.formatting import byte_size
from weft.observe.console import Console

FAMILIES = "all but mpt, with components that torch.export can capture; the page of this format says which were tried."
_MOST = 2**31 - 1


def export(
    source: Path,
    out: Path,
    console: Console,
    *,
    dtype: str | torch.dtype | None = None,
    target: str = "llvm",
) -> str:
    """Writes model.so (a Relax program for TVM's virtual machine), weights.safetensors and graph.json.

    Args:
        dtype: dtype of the weights. Default: as saved.
        target: TVM's target, such as "llvm" (the CPU of this machine) or "llvm -mcpu=skylake". Default: llvm.

    Raises:
        UserError: the package apache-tvm is missing, TVM cannot compile the model, or the model cannot be captured.
    """
    try:
        from tvm import compile as compile_module  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]
        from tvm import relax  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]
        from tvm.relax.frontend.torch import from_exported_program  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"--to tvm needs apache-tvm ({error}); run: pip install 'weft-train[tvm]'") from None
    graph = open_graph(source, "tvm", dtype)
    program = graph.capture()
    for node in program.graph.nodes:
        # TVM converts a missing bound to infinity, also for integers.
        if node.target is torch.ops.aten.clamp.default and len(node.args) == 2 and isinstance(node.args[1], int):
            node.args = (*node.args, _MOST)
    with lowering(f"tvm (target {target!r})", "use --to onnx"):
        module = from_exported_program(program, keep_params_as_input=True)
        module["main"] = _one_past(module["main"], len(graph.module.cache_shapes()))
        module, parameters = relax.frontend.detach_params(relax.transform.Normalize()(module))
        compiled = compile_module(module, target=target)
    weights = parameters["main"]
    with new_graph_folder(out, graph, graph.description("tvm") | {"weights": len(weights)}) as folder:
        compiled.export_library(str(folder / "model.so"))
        write_weights(folder, weights)
    return f"TVM library for {target}, {byte_size(graph.bytes)} of weights"


def _one_past(function: Any, caches: int) -> Any:
    """Returns a Relax function in which all caches have the same symbol for the number of past tokens.

    TVM's importer keeps a symbol for each cache, and cannot add an attention mask of another symbol to the scores.
    """
    symbols = [parameter.ty.shape[2] for parameter in function.params[2 : 2 + caches]]
    return function.bind_symbolic_vars({one: symbols[0] for one in symbols if not one.same_as(symbols[0])})
