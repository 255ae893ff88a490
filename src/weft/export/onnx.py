"""Exports models to ONNX, which onnxruntime runs with a key/value cache and dynamic sizes."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import torch

from weft.checkpoint.huggingface.import_model import parse_dtype
from weft.checkpoint.tensor_file import dtype_name
from weft.errors import UserError
from weft.export.graph import input_names, new_graph_folder, open_graph, output_names
from weft.export.lowering import lowering
from weft.formatting import byte_size
from weft.observe.console import Console

FAMILIES = "all; custom components if torch.export can capture them; no type: hf."
_DTYPES = (torch.float32, torch.float16)


def export(source: Path, out: Path, console: Console, *, dtype: str | torch.dtype = "float32") -> str:
    """Writes model.onnx and model.onnx.data (the weights), graph.json and tokenizer files.

    The inputs and outputs have the names that are usual for ONNX models of Hugging Face: input_ids, position_ids,
    past_key_values.N.key and .value; logits, present.N.key and .value. docs/export/onnx.md describes them.

    Args:
        dtype: dtype of the weights, float32 or float16. Default: float32.

    Raises:
        UserError: onnx or onnxscript is not installed, or the model cannot be exported.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(f"--to onnx needs {' and '.join(missing)}; run: pip install 'weft-train[onnx]'")
    kind = parse_dtype(dtype)
    if kind not in _DTYPES:
        given = dtype if kind is None else dtype_name(kind)
        raise UserError(f"dtype: {given} is not supported by --to onnx; use float32 or float16")
    graph = open_graph(source, "onnx", kind)
    inputs = [name.replace("past.", "past_key_values.") for name in input_names(graph.section)]
    names = ["input_ids", "position_ids", *inputs[2:]], output_names(graph.section)
    program = graph.capture()
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # its warnings are about torchvision
    try:
        with lowering("onnx", "use --to torch"):
            made = torch.onnx.export(
                program, (), input_names=names[0], output_names=names[1], dynamo=True, verbose=False,
                dynamic_shapes=graph.module.dynamic_shapes(),
            )  # fmt: skip
    finally:
        logger.setLevel(level)
    assert made is not None
    with new_graph_folder(out, graph, graph.description("onnx", names)) as folder:
        made.save(folder / "model.onnx", external_data=True)
    return f"ONNX model, {byte_size(graph.bytes)} of weights"
