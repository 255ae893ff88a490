"""Exports models to a `torch.export` program (.pt2), which PyTorch loads without Weft."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.export.graph import new_graph_folder, open_graph
from weft.formatting import byte_size
from weft.observe.console import Console

FAMILIES = "all; custom components if torch.export can capture them; no type: hf."


def export(source: Path, out: Path, console: Console, *, dtype: str | torch.dtype | None = None) -> str:
    """Writes model.pt2 (a `torch.export` program with a key/value cache), graph.json and tokenizer files.

    `torch.export.load("OUT/model.pt2").module()` returns a module that PyTorch runs without Weft. docs/export/torch.md
    describes its arguments.

    Args:
        dtype: dtype of the weights. Default: as saved.

    Raises:
        UserError: the model is not a built-in decoder, or cannot be captured.
    """
    graph = open_graph(source, "torch", dtype)
    program = graph.capture()
    with new_graph_folder(out, graph, graph.description("torch")) as folder:
        torch.export.save(program, folder / "model.pt2")
    return f"torch.export program, {byte_size(graph.bytes)} of weights"
