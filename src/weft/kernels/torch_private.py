"""The private names of torch that compiled blocks and attention on CPUs need. `weft.torch_private` has the others."""

from __future__ import annotations

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
    "torch.ops:aten._softmax_backward_data": "the gradient of a softmax in one pass",
}

softmax_backward = torch.ops.aten._softmax_backward_data


def compile_graph(
    graph: torch.fx.GraphModule, inputs: list[Any], options: dict[str, Any], *, test_vectors: bool = False
) -> Any:
    """Compiles a graph with Inductor, backward too, and returns a function of the same inputs.

    Args:
        test_vectors: whether Inductor first tests with a small program whether the C++ compiler can use the processor's
            vector instructions. An environment variable of Inductor (TORCHINDUCTOR_VEC_ISA_OK) has precedence.
    """
    import torch._functorch.config as functorch
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    if not test_vectors and getattr(config.cpp, "vec_isa_ok", True) is None:  # True: a version without the setting
        options = {"cpp.vec_isa_ok": True, **options}
    early = {"force_non_lazy_backward_lowering": True} if hasattr(functorch, "force_non_lazy_backward_lowering") else {}
    with functorch.patch(early):
        return compile_fx(graph, inputs, config_patches=options)


def forget_compiled_code() -> None:
    """Clears Inductor's tables of code that this process loaded."""
    from torch._inductor.utils import clear_caches

    clear_caches()


def default_folder() -> str:
    """Returns the folder in which Inductor keeps compiled code if nothing else is set."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()
