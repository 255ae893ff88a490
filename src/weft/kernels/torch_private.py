"""The private names of torch that compiled blocks and attention on CPUs need. `weft.torch_private` has the others."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import torch

# The private names; `weft.torch_private.NAMES` gives each of its own a reason.
NAMES = {
    "torch._inductor.compile_fx:compile_fx": "compiles a graph, within a lock and with a second try",
    "torch._inductor.utils:clear_caches": "forgets damaged code that was loaded from the compiler's cache",
    "torch._inductor.runtime.cache_dir_utils:default_cache_dir": "the folder that importing torch._dynamo writes to "
    "the environment, which then looks as if the user had chosen it",
    "torch._inductor.config:cpp": "`vec_isa_ok`: skips a test of vector instructions in each process",
    "torch._functorch.config:patch": "compiles backward together with forward, within the same lock",
    "torch._inductor.async_compile:AsyncCompile._wait_futures": "lowers backward while forward's kernels are compiled",
    "torch._inductor.codecache:CppPythonBindingsCodeCache.load_pybinding_async": "compiles the header of all kernels",
    "torch._inductor.cpp_builder:_get_optimization_cflags": "chooses a faster linker",
    "torch.ops:aten._softmax_backward_data": "the gradient of a softmax in one pass",
}

softmax_backward = torch.ops.aten._softmax_backward_data


def compile_graph(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any], *, careful: bool = False
) -> Any:
    """Compiles a graph with Inductor, backward too, and returns a function of the same inputs.

    Args:
        careful: whether Inductor first tests with a small program whether the C++ compiler can use the processor's
            vector instructions, and links with the compiler's own linker. An environment variable of Inductor
            (TORCHINDUCTOR_VEC_ISA_OK) has precedence.
    """
    import torch._functorch.config as functorch
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    if not careful and getattr(config.cpp, "vec_isa_ok", True) is None:  # True: a version without the setting
        options = {"cpp.vec_isa_ok": True, **options}
    early = {"force_non_lazy_backward_lowering": True} if hasattr(functorch, "force_non_lazy_backward_lowering") else {}
    _choose_linker(() if careful or sys.platform != "linux" else ("lld", "gold"))
    cpu = {x.device.type for x in inputs if isinstance(x, torch.Tensor)} == {"cpu"}
    # On GPUs, Inductor's cache keeps only kernels that were awaited.
    with functorch.patch(early), config.patch(options), _waits_at_the_end() if cpu else nullcontext():
        if cpu:  # in a copy of the context, which has the patched configuration
            threading.Thread(target=copy_context().run, args=[_compile_header], daemon=True).start()
        return compile_fx(graph, inputs, config_patches=options)


def _choose_linker(names: tuple[str, ...]) -> None:
    """Makes Inductor link with the first of these linkers that is installed, or else with the compiler's own.

    GNU ld reads the symbols of all of PyTorch for each kernel: 0.4 of 1.7 s.
    """
    from torch._inductor import cpp_builder

    flags = cpp_builder._get_optimization_cflags
    plain = flags.args[0] if isinstance(flags, partial) else flags
    name = next((name for name in names if shutil.which(f"ld.{name}")), None)
    cpp_builder._get_optimization_cflags = plain if name is None else partial(_with_linker, plain, name)


def _with_linker(flags: Callable[..., tuple[list, list]], name: str, *args: Any, **options: Any) -> tuple[list, list]:
    compiler, linker = flags(*args, **options)
    return compiler, [*linker, f"fuse-ld={name}"]


def _compile_header() -> None:
    """Compiles what all kernels include, 10 s where it is missing, while a graph is lowered to kernels.

    The kernels wait for it, and compile it if this fails.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    with suppress(Exception):
        CppPythonBindingsCodeCache.load_pybinding_async([], "#include <torch/csrc/inductor/cpp_prefix.h>\n")


@contextmanager
def _waits_at_the_end() -> Iterator[None]:
    """Context at whose end Inductor waits for the C++ compiler, which runs beside the lowering of backward."""
    from torch._inductor.async_compile import AsyncCompile

    wait, waiting = AsyncCompile._wait_futures, []
    AsyncCompile._wait_futures = lambda *arguments: waiting.append(arguments)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        AsyncCompile._wait_futures = wait
    for arguments in waiting:
        wait(*arguments)


def forget_compiled_code() -> None:
    """Clears Inductor's tables of code that this process loaded."""
    from torch._inductor.utils import clear_caches

    clear_caches()


def default_folder() -> str:
    """Returns the folder in which Inductor keeps compiled code if nothing else is set."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()
