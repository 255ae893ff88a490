"""Declares the C function that runs a decoding step on CPUs (`native/decode_step.c`)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p

from weft.kernels.native_library import load_library

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
    """Returns the library with the functions `decode_step` and `workspace_bytes`. See `load_library`."""
    loaded = load_library("decode_step", wait=wait)
    if loaded is not None:
        loaded.decode_step.argtypes = [POINTER(Model), POINTER(Step)]
        loaded.decode_step.restype = None
        loaded.workspace_bytes.argtypes = [POINTER(Model), c_int64, c_int64, c_int64]
        loaded.workspace_bytes.restype = c_int64
    return loaded
