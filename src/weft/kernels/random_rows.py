"""The C function that draws random numbers by index on CPUs (`native/random_rows.c`).

Its plain reference, with the same bits, is `weft.models.counter_random`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from ctypes import c_double, c_int64, c_uint64, c_void_p
from functools import cache

import torch

from weft.kernels.native_library import load_library

FLAGS = ("-ffp-contract=off",)  # rounds each product, as PyTorch's functions do
SMALL = 2**14  # values that are drawn in less time than the library is loaded
OF_THREAD = 2**16  # the least number of values for which another thread helps
LARGE = 2**26  # values for which the reference takes longer than the compiler
log = logging.getLogger("weft")


def rows_function(count: int) -> Callable[..., None] | None:
    """Returns the function that fills rows, if it makes drawing `count` values faster; None: use the reference.

    The arguments are those of `fill_rows` in the source: out (float32, contiguous, `[rows, columns]`), rows (int64),
    first column, seed, whether values are normally distributed, and their scale.
    """
    if count < SMALL:
        return None
    try:
        library = load_library("random_rows", *FLAGS, wait=count >= LARGE)
    except OSError as error:
        _report(str(error))
        return None
    if library is None:
        return None
    function = library.fill_rows
    function.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_uint64, c_int64, c_double, c_int64]
    function.restype = None

    def fill(out: torch.Tensor, rows: torch.Tensor, first: int, seed: int, normal: bool, scale: float) -> None:
        threads = max(1, min(torch.get_num_threads(), out.numel() // OF_THREAD))
        function(out.data_ptr(), rows.data_ptr(), *out.shape, first, seed, normal, scale, threads)

    return fill


@cache
def _report(problem: str) -> None:
    """Logs, once, why the reference draws large tensors."""
    log.info("initial weights are drawn by PyTorch, which takes longer than the C function: %s", problem)
