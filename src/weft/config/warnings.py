"""Finds warnings about a valid config: keys without effect, and features that this machine does not support.

`weft config check` prints the warnings, and so does a run when it starts. They are not errors, because a config for
many GPUs is also tried on one rank, and checked on machines without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from weft.config.components import misspelled_methods
from weft.config.mesh import MeshShape
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.headers import read_store_header

# Keys that choose batches, and have no effect if the batches are passed to `Trainer.step`.
_BATCHES = (
    *(f"data.{key}" for key in ("train", "shuffle", "workers", "temperature", "curriculum", "mixture_block")),
    "data.length_warmup",
    "training.batch_tokens",
)


def warnings(config: RunConfig, mesh: MeshShape, *, open_data: bool = True, given: bool = False) -> list[str]:
    """Returns all warnings about a config, one text each.

    Args:
        mesh: the mesh of the run.
        given: whether the batches are passed to `Trainer.step`.
        open_data: whether the headers of token stores are read and checked too.
    """
    found = [*_held_out(config), *_parallel(config, mesh), *_device(config), *_hooks(config), *_untrained(config)]
    if given and (unused := [key for key in _BATCHES if _is_set(config, key)]):
        found.append(f"{', '.join(unused)}: no effect, because the batches are passed to Trainer.step")
    return found + ([*_unknown_tokenizers(config), *_split_conversations(config)] if open_data else [])


def _hooks(config: RunConfig) -> Iterator[str]:
    """Yields a warning for each method of a callback or metric whose name is almost that of a method Weft calls."""
    listed = ("callback", "callbacks", config.callbacks), ("metric", "log.metrics", config.log.metrics)
    for kind, key, sections in listed:
        for number, section in enumerate(sections):
            for given, hook in misspelled_methods(section.type, kind):
                yield f"{key}[{number}] ({section.type}): Weft does not call the method {given}; did you mean {hook}?"


def _untrained(config: RunConfig) -> Iterator[str]:
    """Yields a warning if the objective does not train the model's multi-token prediction layers."""
    kind, model = config.objective.type, config.model
    trained = kind in ("pretrain", "sft") and config.objective.arguments.get("mtp_loss_factor") != 0
    if isinstance(model, ModelSection) and model.num_nextn_predict_layers and not trained and ":" not in kind:
        yield f"model.num_nextn_predict_layers: objective {kind} does not train these layers as set; set 0"


def _is_set(config: RunConfig, key: str) -> bool:
    return config.origins.get(key, "default") != "default"


def _held_out(config: RunConfig) -> Iterator[str]:
    if config.data.validation is None:
        for name in ("every", "tokens", "micro_batch_size"):
            if _is_set(config, f"validation.{name}") and not (name == "every" and config.samples.prompts):
                yield f"validation.{name}: no effect without data.validation; set data.validation, or remove the key"
    trained = set(map(os.path.realpath, config.data.stores.values()))
    held_out: dict[str, str] = {}
    for key, store in config.data.held_out_stores.items():
        path = os.path.realpath(store)
        if (other := held_out.setdefault(path, key)) != key:
            yield f"{key}: {store} is {other} too, so its tokens count twice in validation_loss; remove one of the two"
        if path in trained:
            what = f"{key}: {store} is training data too, so its loss does not measure generalization"
            yield f"{what}; hold out other documents (`weft data split`)"


def _split_conversations(config: RunConfig) -> Iterator[str]:
    """Yields a warning for conversations in the validation data that are packed like the texts in the training data."""
    data = config.data
    if data.packing != "concatenate" or data.document_attention or _is_set(config, "data.packing"):
        return
    for key, store in data.held_out_stores.items():
        if read_store_header(store).kind == "conversations":
            what = f"{key}: conversations are joined and split at any token, because data.train has texts"
            yield f"{what}; set data.packing: best_fit to validate on complete conversations"


def _parallel(config: RunConfig, mesh: MeshShape) -> Iterator[str]:
    parallel = config.parallel
    for key, axis in (("pp_schedule", "pp"), ("cp_method", "cp")):
        if mesh.sizes[axis] == 1 and _is_set(config, f"parallel.{key}"):
            yield f"parallel.{key}: no effect, because parallel.{axis} is 1; remove the key, or set {axis}"
    after = parallel.reshard_after_forward
    if mesh.fsdp == 1 and type(after) is int:
        what = f"{after} has no effect, because parameters are not sharded (dp_shard 1 x cp 1)"
        yield f"parallel.reshard_after_forward: {what}; remove the key, or set dp_shard"
    if mesh.pp > 1 and parallel.reduces_every:
        key = "reduce_gradients" if parallel.reduce_gradients is not None else "zero_stage"
        what = (
            f"{getattr(parallel, key)} reduces gradients with every micro-batch, but a pipeline does it once per step"
        )
        remedy = "set last" if key == "reduce_gradients" else "set 1, or set reshard_after_forward instead"
        yield f"parallel.{key}: {what}; {remedy}"


def _device(config: RunConfig) -> Iterator[str]:
    """Yields warnings about features that need a GPU, and about fp8 without compilation."""
    asked = {"training.fp8": config.training.fp8, "parallel.async_tp": config.parallel.async_tp}
    if config.training.compile == "reduce-overhead" and not _gpu_visible():
        yield "training.compile: reduce-overhead is the same as true here, because this machine has no visible GPU"
    for key in [key for key, on in asked.items() if on and not _gpu_visible()]:
        yield f"{key}: needs a GPU, but this machine has no visible GPU; remove the key to train on a CPU"
    if config.training.fp8 and not config.training.compile:
        yield "training.fp8 is slow without training.compile, because casts are not fused; set compile: true"


def _gpu_visible() -> bool:
    """Whether this process can use an NVIDIA or AMD GPU, as far as this is known without torch."""
    hidden = (os.environ.get(name, "0").strip() for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    return not any(value in ("", "-1") for value in hidden) and any(
        Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    )


def _unknown_tokenizers(config: RunConfig) -> list[str]:
    """Returns a warning if the run has several stores and the tokenizer of one store is not known."""
    train = 1 if isinstance(config.data.train, str) else len(config.data.sources)
    stores = [*config.data.stores.values(), *config.data.held_out_stores.values()]
    unknown = [store for store in stores if read_store_header(store).tokenizer_digest is None]
    if not unknown or (train < 2 and len(unknown) == len(stores)):
        return []
    return [
        f"the tokenizer of {', '.join(unknown)} is not known, so its token ids cannot be compared with those of the "
        "other stores; convert the store again with --tokenizer"
    ]
