"""Exports models to StableHLO, which JAX and other programs compile with XLA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weft.errors import UserError
from weft.export.graph import new_graph_folder, open_graph, write_weights
from weft.export.lowering import lowering
from weft.formatting import byte_size
from weft.observe.console import Console

FAMILIES = "all, with components that torch.export can capture; the page of this format says which were tried."
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    source: Path,
    out: Path,
    console: Console,
    *,
    dtype: str | torch.dtype | None = None,
    platform: str = "cpu",
) -> str:
    """Writes model.stablehlo, model.jax (the same for `jax.export.deserialize`), weights.safetensors and graph.json.

    Args:
        dtype: dtype of the weights. Default: as saved.
        platform: platform for which JAX lowers the model: cpu, cuda, rocm or tpu. Default: cpu.

    Raises:
        UserError: the packages torchax or jax are missing, the platform is unknown, or the model cannot be captured.
    """
    if platform not in _PLATFORMS:
        raise UserError(f"--platform {platform}: not a platform; use one of {', '.join(_PLATFORMS)}")
    jax, to_jax = _libraries()
    graph = open_graph(source, "stablehlo", dtype)
    program = graph.capture()
    batch, seq, past = jax.export.symbolic_shape("batch, seq, past")
    kind = jax.numpy.dtype(str(graph.module.dtype).removeprefix("torch."))
    ids = jax.ShapeDtypeStruct((batch, seq), "int32")
    cache = [jax.ShapeDtypeStruct((batch, heads, past, size), kind) for heads, size in graph.module.cache_shapes()]
    with lowering("stablehlo", "use --to onnx"):
        weights, function = to_jax(program)
        shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), weights)
        exported = jax.export.export(jax.jit(function), platforms=[platform])(shapes, (ids, ids, *cache))
    description = graph.description("stablehlo")
    for entry in description["inputs"][:2]:
        entry["dtype"] = "int32"
    with new_graph_folder(out, graph, description | {"smallest_past": 1, "weights": len(weights)}) as folder:
        (folder / "model.stablehlo").write_bytes(exported.mlir_module_serialized)
        (folder / "model.jax").write_bytes(exported.serialize())
        write_weights(folder, weights)
    return f"StableHLO for {platform}, {byte_size(graph.bytes)} of weights"


def _libraries() -> tuple[Any, Any]:
    """Imports jax and torchax. Returns jax and torchax's conversion of exported programs."""
    try:
        import flatbuffers  # noqa: F401  # for Exported.serialize
        import jax  # pyright: ignore[reportMissingImports]
        import jax.export  # pyright: ignore[reportMissingImports]

        with _named_overloads():
            from torchax.export import exported_program_to_jax  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"--to stablehlo needs torchax and jax ({error}); run: pip install 'weft-train[stablehlo]'"
        ) from None
    return jax, exported_program_to_jax


@contextmanager
def _named_overloads() -> Iterator[None]:
    """Context manager in which `torch.ops` has placeholders for the overloads with dimension names.

    torchax 0.0.13 lists these overloads when it is imported, and torch 2.13 has removed them. They never occur in a
    graph.
    """
    packets: Any = type(torch.ops.aten.clamp)
    found = packets.__getattr__

    def get(packet: Any, name: str) -> Any:
        try:
            return found(packet, name)
        except AttributeError:
            if "names" in name or "dimname" in name.lower():
                return (str(packet), name)
            raise

    packets.__getattr__ = get
    try:
        yield
    finally:
        packets.__getattr__ = found
