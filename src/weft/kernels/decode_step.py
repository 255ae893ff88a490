"""Compiles and loads the C function that runs a decoding step on CPUs (`native/decode_step.c`).

The function needs no headers of PyTorch, so that a C compiler builds it in seconds. The library is kept in the user's
cache directory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

from weft.kernels.processor import cpuinfo

SOURCES = Path(__file__).parent / "native"
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math"]
MAX_ROWS = 32  # tokens per step
DTYPES = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
NORMS = ("rmsnorm", "rmsnorm1p", "layernorm")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


class Vector(ctypes.Structure):
    """Address and dtype of a float tensor; a null address if the tensor is absent.

    This structure and the next ones mirror `native/types.h`.
    """

    _fields_ = (("data", c_void_p), ("dtype", c_int64))


class Norm(ctypes.Structure):
    """The parameters of a norm."""

    _fields_ = (("weight", Vector), ("bias", Vector))


class Matrix(ctypes.Structure):
    """The weight and bias of a linear layer. If the weight is quantized, `scale` is the address of its scales."""

    _fields_ = (
        ("data", c_void_p),
        ("scale", c_void_p),
        *((name, c_int64) for name in ("rows", "columns", "dtype")),
        ("bias", Vector),
    )


class Layer(ctypes.Structure):
    """The parameters of a transformer block, and the addresses of its cached keys and values."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, Norm) for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
        *((name, Vector) for name in ("q_norm", "k_norm", "sinks")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("window", "rotary")),
    )


class Model(ctypes.Structure):
    """The sizes, settings and parameters of a decoder."""

    _fields_ = (
        *((name, c_int64) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "rotary_dim")),
        *((name, c_int64) for name in ("cache_dtype", "norm_kind", "activation", "parallel", "norm_all_heads")),
        *((name, c_double) for name in ("eps", "embedding_multiplier", "residual_multiplier", "logits_scaling")),
        *((name, c_double) for name in ("score_scale", "score_softcap", "logit_softcap", "clip")),
        *((name, Vector) for name in ("embedding", "positions", "slopes")),
        ("norm", Norm),
        ("head", Matrix),
        ("layer", POINTER(Layer)),
    )


class Step(ctypes.Structure):
    """The inputs and outputs of one decoding step."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "kept", "threads", "longest")),
        *((name, c_void_p) for name in ("tokens", "positions", "angles", "tables", "kept_rows", "blocks")),
        ("cos", c_void_p * 2),
        ("sin", c_void_p * 2),
        ("logits", c_void_p),
        ("workspace", c_void_p),
    )


def library(wait: bool = True) -> ctypes.CDLL | None:
    """Returns the compiled library. The first call starts the compiler in another thread, if necessary.

    Args:
        wait: whether to wait for the compiler. If False, the result is None until the compiler has finished.

    Raises:
        OSError: there is no C compiler, the compiler failed, or the library cannot be written or loaded. The message
            has one line.
    """
    future = _start()
    return future.result() if wait or future.done() else None


@cache
def _start() -> Future[ctypes.CDLL]:
    future: Future[ctypes.CDLL] = Future()

    def run() -> None:
        try:
            future.set_result(_load())
        except OSError as error:
            future.set_exception(error)

    try:
        compiled = _path(_compiler()).exists()
    except OSError:
        compiled = True  # fails again in `run`
    run() if compiled else threading.Thread(target=run, daemon=True).start()
    return future


def _compiler() -> str:
    for name in (os.environ.get("CC") or "cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return found
    raise OSError("there is no C compiler; install gcc or clang")


@cache
def _path(compiler: str) -> Path:
    """Returns the path of the library, which depends on the sources, the compiler and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(version + " ".join(FLAGS).encode() + platform.machine().encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(("".join(cpuinfo("flags", "Features")) or platform.processor()).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "kernels"
    return folder / f"decode_step-{digest.hexdigest()[:20]}.so"


def _load() -> ctypes.CDLL:
    compiler = _compiler()
    path = _path(compiler)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            command = [compiler, *FLAGS, "-o", str(new), str(SOURCES / "decode_step.c"), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
                raise OSError(f"{compiler} cannot compile {SOURCES / 'decode_step.c'}: {first}")
            os.replace(new, path)  # atomic, for other processes that compile it too
    loaded = ctypes.CDLL(str(path))  # its calls release the GIL
    loaded.decode_step.argtypes = [POINTER(Model), POINTER(Step)]
    loaded.decode_step.restype = None
    loaded.workspace_bytes.argtypes = [POINTER(Model), c_int64, c_int64, c_int64]
    loaded.workspace_bytes.restype = c_int64
    return loaded
