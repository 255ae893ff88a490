"""What a checked config asks for in vain: keys without effect, and what this machine cannot do.

Each is a line of `weft config check`, and of a run when it starts. The files stay legal: a file for many ranks is also
tried on one, and checked where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from weft.config.mesh import MeshShape
from weft.config.sections import RunSections
from weft.headers import read_store_header


def warnings(config: RunSections, mesh: MeshShape, *, open_data: bool = True) -> list[str]:
    """All of them.

    Args:
        mesh: of the ranks that the run has, or would have.
        open_data: whether the headers of token stores may be read.
    """
    found = [*_validation(config), *_mesh(config, mesh), *_device(config)]
    return found + (_unknown_tokenizers(config) if open_data else [])


def _stated(config: RunSections, key: str) -> bool:
    return config.origins.get(key, "default") != "default"


def _validation(config: RunSections) -> Iterator[str]:
    if config.data.validation is None:
        for name in ("every", "tokens", "micro_batch_size"):
            if _stated(config, f"validation.{name}") and not (name == "every" and config.samples.prompts):
                yield f"validation.{name}: no effect without data.validation; name held-out data, or remove the key"
    trained = set(map(os.path.realpath, config.data.stores.values()))
    held_out: dict[str, str] = {}
    for key, store in config.data.held_out_stores.items():
        path = os.path.realpath(store)
        if (other := held_out.setdefault(path, key)) != key:
            yield f"{key}: {store} is {other} as well, so its tokens count twice in validation_loss; remove one of them"
        if path in trained:
            yield f"{key}: {store} is training data as well, so its loss does not tell what the model learned; " + (
                "hold some documents out (`weft data split`)"
            )


def _mesh(config: RunSections, mesh: MeshShape) -> Iterator[str]:
    parallel = config.parallel
    for key, axis in (("pp_schedule", "pp"), ("cp_method", "cp")):
        if mesh.sizes[axis] == 1 and _stated(config, f"parallel.{key}"):
            yield f"parallel.{key}: no effect, for parallel.{axis} is 1; remove the key, or set {axis}"
    after = parallel.reshard_after_forward
    if mesh.fsdp == 1 and type(after) is int:
        what = "no effect, for one rank has all parameters (dp_shard 1 x cp 1)"
        yield f"parallel.reshard_after_forward: {after} has {what}; remove the key, or set dp_shard"
    if mesh.pp > 1 and parallel.reduces_every:
        key = "reduce_gradients" if parallel.reduce_gradients is not None else "zero_stage"
        what = f"{getattr(parallel, key)} sums gradients with every micro-batch, but a pipeline sums them once a step"
        instead = "set last" if key == "reduce_gradients" else "set 1, or reshard_after_forward by itself"
        yield f"parallel.{key}: {what}; {instead}"


def _device(config: RunSections) -> Iterator[str]:
    """What a CPU refuses when a run starts."""
    asked = {"training.fp8": config.training.fp8, "parallel.async_tp": config.parallel.async_tp}
    for key in [key for key, on in asked.items() if on and not _gpu_visible()]:
        yield f"{key}: no GPU is visible on this machine, and `weft train` refuses the key on a CPU"
    if config.training.fp8 and not config.training.compile:
        yield "training.fp8 without training.compile: rounding takes longer than is won; set compile: true"


def _gpu_visible() -> bool:
    """Whether the system shows a GPU of NVIDIA's or AMD's to this process, as far as that is known without torch."""
    hidden = (os.environ.get(name, "0").strip() for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    return not any(value in ("", "-1") for value in hidden) and any(
        Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    )


def _unknown_tokenizers(config: RunSections) -> list[str]:
    """Where nobody knows a store's tokenizer, and others are there to differ from."""
    train = 1 if isinstance(config.data.train, str) else len(config.data.sources)
    stores = [*config.data.stores.values(), *config.data.held_out_stores.values()]
    unknown = [store for store in stores if read_store_header(store).tokenizer_digest is None]
    if not unknown or (train < 2 and len(unknown) == len(stores)):
        return []
    return [
        f"the tokenizer of {', '.join(unknown)} is not known (`weft data convert` was not told it): nothing checks "
        "that its ids mean the same as the other stores'; convert again with --tokenizer"
    ]
