"""Exports models to ExecuTorch (.pte), which runs on phones and other small devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.errors import UserError
from weft.export.graph import Sizes, new_graph_folder, open_graph
from weft.export.lowering import lowering
from weft.formatting import byte_size
from weft.observe.console import Console

FAMILIES = "all, with components that torch.export can capture; the page of this format says which were tried."


def export(
    source: Path,
    out: Path,
    console: Console,
    *,
    dtype: str | torch.dtype | None = None,
    batch: int = 1,
    max_prompt: int = 256,
    max_length: int = 1024,
) -> str:
    """Writes model.pte, whose linear layers and other operators run in XNNPACK, and graph.json.

    Args:
        dtype: dtype of the weights. Default: as saved.
        batch: number of sequences of each call. Default: 1.
        max_prompt: maximum number of new tokens of a call; longer prompts are run in several calls. Default: 256.
        max_length: maximum number of cached tokens. Default: 1024.

    Raises:
        UserError: the package executorch is missing, or the model cannot be captured.
    """
    for name, value in (("batch", batch), ("max-prompt", max_prompt), ("max-length", max_length)):
        if value < (1 if name == "batch" else 8):
            raise UserError(f"--{name} {value}: too small; use at least {1 if name == 'batch' else 8}")
    try:
        from executorch.exir import to_edge_transform_and_lower  # pyright: ignore[reportMissingImports]

        partitioner = _partitioner()
    except ImportError as error:
        raise UserError(
            f"--to executorch needs executorch ({error}); run: pip install 'weft-train[executorch]'"
        ) from None
    graph = open_graph(source, "executorch", dtype)
    largest = Sizes(batch, max_prompt, max_length)
    captured = graph.capture(largest=largest)
    with lowering("executorch", "use --to onnx"):
        lowered = to_edge_transform_and_lower(captured, partitioner=[partitioner])
        program = lowered.to_executorch()
    description = graph.description("executorch") | {"batch": batch, "max_prompt": max_prompt, "max_length": max_length}
    with new_graph_folder(out, graph, description) as folder, open(folder / "model.pte", "wb") as file:
        program.write_to_file(file)
    return f"ExecuTorch program, {byte_size(graph.bytes)} of weights"


def _partitioner() -> Any:
    """Returns the partitioner of XNNPACK, without GELU by the tanh formula, for which XNNPACK has the exact formula.

    The difference is up to 5e-4 for each element. ExecuTorch's own operator computes the tanh formula.
    """
    from executorch.backends.xnnpack.partition.config import (  # pyright: ignore[reportMissingImports]
        ALL_PARTITIONER_CONFIGS,
        GeluConfig,
    )
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # pyright: ignore[reportMissingImports]

    class ExactGelu(GeluConfig):
        def check_constraints(self, node: torch.fx.Node, ep: torch.export.ExportedProgram) -> bool:
            return node.kwargs.get("approximate", "none") == "none" and super().check_constraints(node, ep)

    return XnnpackPartitioner([ExactGelu if one is GeluConfig else one for one in ALL_PARTITIONER_CONFIGS])
