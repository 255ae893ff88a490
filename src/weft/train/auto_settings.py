"""Settings that Weft chooses for a session: dtype, CPU threads, determinism, and the behavior of the memory allocator.

The dtype changes results, so a resumed run reuses it. The number of threads depends on the ranks and cores of the
current session.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from weft.config.training import TrainingSection
from weft.errors import UserError
from weft.kernels.processor import multiplies_bfloat16
from weft.processes import usable_cores

if TYPE_CHECKING:
    from weft.config.run import RunConfig
    from weft.parallel.world import World

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Read by the allocator of GPUs when it starts. Without it, memory that was freed in pieces of other sizes is lost: with
# expandable segments, the allocator maps physical memory to one range of addresses, which grows.
GPU_ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # other names of the same
# Read by cuBLAS and NCCL when they start. cuBLAS: workspaces of a fixed size, which torch asks for. NCCL: no reduction
# within a switch (NVLink SHARP), whose order of additions is not fixed.
EXACT_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}


def choose(training: TrainingSection, device: torch.device) -> TrainingSection:
    """Returns `training` with values for this device in place of `dtype: auto`, and of missing other settings."""
    threads, given = training.threads, os.environ.get("OMP_NUM_THREADS", "")
    if threads is None and device.type == "cpu":
        share = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        threads = int(given) if given.isdigit() else share
    dtype = training.dtype
    if dtype == "auto":
        dtype = "bfloat16" if bfloat16_is_faster(device) else "float32"
    determinism = training.determinism or ("exact" if device.type == "cpu" else "order")
    return training.model_copy(update={"dtype": dtype, "threads": threads, "determinism": determinism})


def warn_of_no_graphs(training: TrainingSection, device: torch.device) -> str | None:
    """Returns a warning if `reduce-overhead` records no CUDA graphs because `dtype: auto` was chosen as float32."""
    if training.compile != "reduce-overhead" or training.dtype != "float32" or device.type != "cuda":
        return None
    what = "is the same as true here: CUDA graphs need 16 bits, and dtype: auto is float32 on this GPU"
    return f"training.compile: reduce-overhead {what}; set compile: true, or dtype: float16"


def agree_on_settings(training: TrainingSection, world: World) -> TrainingSection:
    """Returns what the first rank chooses (`choose`), and applies it on all ranks. All ranks must call it."""
    chosen = world.agree(lambda: choose(training, world.device).model_dump(), only_first=True)
    settings = TrainingSection(**chosen)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return settings


def prepare_environment(config: RunConfig, *, gpu: bool | None = None) -> list[str]:
    """Sets environment variables of GPUs, NCCL and `determinism: exact`, before libraries read them.

    Existing values are kept, and `parallel.nccl` goes before `determinism: exact`. Returns a line for each value that
    is not the one that Weft would set.

    Args:
        gpu: whether the run is on GPUs. Default: whether there are GPUs.
    """
    asked = EXACT_ENVIRONMENT if config.training.determinism == "exact" else {}
    kept = []
    if torch.cuda.is_available() if gpu is None else gpu:
        nccl = {name: str(value) for name, value in config.parallel.nccl.items()}
        for name in asked.keys() & nccl.keys() - os.environ.keys():
            kept.append(f"parallel.nccl: {name}={nccl[name]} is used; determinism: exact would set {asked[name]}")
        asked = GPU_ENVIRONMENT | asked | nccl
    for name, value in asked.items():
        names = ALLOCATOR if name in ALLOCATOR else (name,)
        given = next((other for other in names if other in os.environ), name)
        found = os.environ.setdefault(given, value)
        if found != value:
            kept.append(f"{given}={found} of the environment is used; without it, Weft would set {name}={value}")
    return kept


@contextmanager
def kernels_of(training: TrainingSection) -> Iterator[None]:
    """Context in which torch uses the kernels of `training.determinism`. Restores torch's settings at the end.

    Raises:
        UserError: an operation has no deterministic kernel on this device.
    """
    if training.determinism != "exact":
        yield
        return
    # Modules whose attributes are properties, which type checkers do not know.
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode()
    fill, fixed, benchmark = memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor costs time, and a result that depends on its content would be a bug in any mode.
    memory.fill_uninitialized_memory = False
    cudnn.deterministic, cudnn.benchmark = True, False
    abandoned = False
    try:
        yield
    except GeneratorExit:  # the program ended without closing the trainer; parts of torch may be gone
        abandoned = True
        raise
    except RuntimeError as error:
        if "use_deterministic_algorithms" not in str(error):
            raise
        operation = str(error).partition(" does not have a deterministic")[0].partition("\n")[0]
        raise UserError(
            f"training.determinism: exact: an operation has no deterministic kernel on this device: {operation}; set "
            "training.determinism: order, or replace the operation"
        ) from error
    finally:
        if not abandoned:
            torch.set_deterministic_debug_mode(before)
            memory.fill_uninitialized_memory = fill
            cudnn.deterministic, cudnn.benchmark = fixed, benchmark


def bfloat16_is_faster(device: torch.device) -> bool:
    """Whether bfloat16 is clearly faster than float32 on this device.

    On a GPU: whether the GPU supports bfloat16. On a CPU: whether the CPU has instructions for it. If that is not
    known, a small matmul is timed in both dtypes.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type == "cpu" and (native := multiplies_bfloat16()) is not None:
        return native

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(8):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(torch.bfloat16) < 0.8 * seconds(torch.float32)


@cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, so that the activations of each step reuse the same addresses.

    Without this setting, each large tensor of a step is a new mapping, which the kernel clears page by page. Call
    it after the first update: optimizer state in the place of freed activations would leave no room there for the
    largest activations of the next step. Does nothing with another C library.
    """
    m_mmap_max, m_trim_threshold = -4, -1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)  # -1: never return memory to the system
