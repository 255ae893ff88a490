"""Exports models to a package that AOTInductor compiles (.pt2), for Python without Weft and for C++."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from weft.errors import UserError
from weft.export.graph import new_graph_folder, open_graph
from weft.export.lowering import lowering
from weft.formatting import byte_size
from weft.observe.console import Console
from weft.torch_private import compile_package

FAMILIES = "all; custom components if torch.export can capture them; no type: hf."


def export(source: Path, out: Path, console: Console, *, dtype: str | torch.dtype | None = None) -> str:
    """Writes model.pt2 (machine code and weights), graph.json and tokenizer files.

    The package runs on CPUs with the instructions of the one that compiled it. Its inputs must be contiguous.

    Args:
        dtype: dtype of the weights. Default: as saved.

    Raises:
        UserError: there is no C++ compiler, or the model cannot be captured.
    """
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        raise UserError("--to aoti needs a C++ compiler; install g++ (such as apt-get install g++)")
    graph = open_graph(source, "aoti", dtype)
    description = graph.description("aoti")
    cache = " ".join(f"{heads}x{size}" for heads, size in graph.module.cache_shapes())
    metadata = {"cache": cache, "dtype": description["inputs"][-1]["dtype"]}
    with new_graph_folder(out, graph, description) as folder:
        program = graph.capture()
        with lowering("aoti", "use --to torch"):
            compile_package(program, folder / "model.pt2", metadata)
    return f"AOTInductor package, {byte_size(graph.bytes)} of weights"
