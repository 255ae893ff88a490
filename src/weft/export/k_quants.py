"""Quantizes GGUF files to K-quants, with llama-cpp-python."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.checkpoint.weights import Weights
from weft.errors import UserError


@dataclass(frozen=True)
class KQuant:
    """A file type of llama.cpp's quantizer: the name of its constant, without prefix."""

    constant: str

    def written_as(self, weights: Weights) -> str:
        """Returns the type of the file that is quantized: bf16 if this is exact, otherwise f32."""
        exact = all(one.dtype == torch.bfloat16 for one in weights.tensors.values() if len(one.shape) > 1)
        return "bf16" if exact else "f32"


K_QUANTS = {
    name: KQuant("MOSTLY_" + name.upper())
    for name in ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
}


def require_quantizer(type: str) -> ModuleType:
    """Returns the module llama_cpp. Raises UserError if it is not installed."""
    try:
        import llama_cpp  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError):  # without its native library, llama_cpp raises the last two
        raise UserError(
            f"--type {type}: K-quants need llama.cpp's quantizer; pip install llama-cpp-python, or use q8_0"
        ) from None
    return llama_cpp


@functools.cache  # llama.cpp keeps the pointer to the function
def _silent(llama_cpp: ModuleType) -> Any:
    return llama_cpp.llama_log_callback(lambda level, text, data: None)


def quantize_file(source: Path, out: Path, type: str) -> None:
    """Quantizes a GGUF file. Raises UserError if llama.cpp's quantizer fails."""
    llama_cpp = require_quantizer(type)
    llama_cpp.llama_log_set(_silent(llama_cpp), ctypes.c_void_p(0))
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{K_QUANTS[type].constant}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(settings)):
        raise UserError(f"--type {type}: llama.cpp's quantizer failed; use q8_0")
