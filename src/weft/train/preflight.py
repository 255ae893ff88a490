"""Checks before the first step: that all ranks have the same run, and that the device and model support it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft
from weft.config.inherited_dropout import inherited_dropout_notices
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.transformers_model import TransformersModelSection, notices
from weft.data.stores.operations.verify import verify as verify_store
from weft.data.stores.store import TokenStore
from weft.data.stores.store_json import sample_digest
from weft.errors import UserError
from weft.formatting import flat
from weft.headers import read_tokenizer_header
from weft.kernels.flash import flash_usable
from weft.kernels.masks import flex_usable
from weft.models.trial import try_components
from weft.processes import ask_compiler
from weft.train.auto_settings import DTYPES
from weft.train.job import Job


def run_facts(config: RunConfig) -> dict[str, str]:
    """Returns name -> text for all config values, data digests and versions that must be equal on all ranks.

    Stores and tokenizers are compared by digest, not by path, because each machine may have its own copy.
    """
    config = config.model_copy(update={"data": config.data.with_stores})
    tree = config.as_dict()
    data = tree["data"]
    if isinstance(data["train"], list):
        data["train"] = [source | {"store": _store(source.get("store"))} for source in data["train"]]
    else:
        data["train"] = _store(data["train"])
    if tree.get("tokenizer"):
        tree["tokenizer"] = _digest(lambda: read_tokenizer_header(tree["tokenizer"]).digest)
    tree = flat(tree) | {key: _store(store) for key, store in config.data.held_out_stores.items()}
    return {
        **{key: value if isinstance(value, str) else json.dumps(value) for key, value in tree.items()},
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of torch": torch.__version__,
        "version of weft": weft.__version__,
    }


def _store(source: Any) -> Any:
    """Returns the digest of a token store. Other values (a custom dataset, None) are returned unchanged."""
    if not isinstance(source, str):
        return source

    def digest() -> str:
        info = TokenStore(source).info
        return hashlib.sha256(f"{info.digest} {info.idx_sha256}".encode()).hexdigest()

    return _digest(digest)


def _digest(read: Callable[[], str]) -> str:
    try:
        return f"digest {read()[:12]}"
    except UserError as error:  # opening the data raises it again, on all ranks
        return str(error)


def check_run(job: Job, *, verify: bool) -> None:
    """Checks the token stores, the decoder and the compiler of a run before it is built. All ranks call it.

    Args:
        verify: whether every byte of the stores is read.
    """
    for note in inherited_dropout_notices(job.config.origins):
        job.console.line(note)
    job.world.agree(lambda: check_compiler(job))
    check_stores(job, complete=verify)
    check_decoder(job)


def check_compiler(job: Job) -> None:
    """Raises UserError if blocks are compiled for a CPU on a host without a C++ compiler."""
    if not job.config.training.compile or job.world.device.type != "cpu":
        return
    path, why = ask_compiler()
    if path is None:
        asked = os.environ.get("CXX")
        missing = "no C++ compiler works here" if asked is None else f"CXX={asked} is no C++ compiler that works"
        why = why and f" ({why})"
        raise UserError(f"training.compile: {missing}{why}; install g++, or set training.compile: false")


def check_stores(job: Job, *, complete: bool) -> None:
    """Compares the token stores of a run with the digests in their `store.json`, on the first rank. All ranks call it.

    Args:
        complete: whether every byte is read, as `weft data verify` does; otherwise blocks of each file.

    Raises:
        UserError: a store is damaged.
    """

    def check() -> None:
        stores = job.config.data.stores | job.config.data.held_out_stores
        for path in dict.fromkeys(stores.values()):
            if complete:
                if problems := verify_store(path, job.console):
                    raise UserError(f"damaged token store: {problems[0]}; restore it from a copy, or pack it again")
                continue
            expected = TokenStore(path).info.sample_sha256
            if expected is not None and sample_digest(Path(path)) != expected:
                raise UserError(
                    "damaged token store: blocks of its files differ from what was written; `weft data verify` "
                    "shows where; restore it from a copy, or pack it again",
                    path,
                )

    job.world.agree(check, only_first=True)


def check_decoder(job: Job) -> None:
    """Checks that this device supports the attention implementation, and tries each custom component of the decoder.

    Raises:
        UserError: flash-attn does not work here, or the decoder cannot use the result of a custom component.
    """
    config, world, model = job.config, job.world, job.config.model
    if not isinstance(model, ModelSection):
        return
    device, dtype = world.device, DTYPES[config.training.dtype]
    if model.attention_implementation == "flash":
        world.agree(lambda: flash_usable(device, dtype))
    if model.attention_implementation == "flex" and not flex_usable(device, dtype, model.qk_head_dim):
        job.console.warning(
            "model.attention_implementation: flex needs a GPU, a 16-bit or 32-bit dtype, and a head size of 16 or "
            "more; this run applies the same masks as dense tensors"
        )
    documents, seq = config.data.document_attention, config.data.sequence_length or 16
    world.agree(
        lambda: try_components(model, seed=config.run.seed, seq=seq, documents=documents, dtype=dtype, device=device)
    )


def check_transformers_model(job: Job, model: nn.Module) -> None:
    """Prints the restrictions of a Transformers model, and checks that the model can be trained on the run's batches.

    Raises:
        UserError: the attention of the model is not causal, or the model cannot separate documents as configured.
    """
    config = job.config
    if not isinstance(config.model, TransformersModelSection):
        return
    from weft.models.transformers_model import missing_capability

    name = type(model).__name__.removeprefix("FSDP")
    for line in notices(config.model, name):
        job.console.line(line)
    lacks = missing_capability(model, documents=config.data.document_attention)

    def raise_if_lacking() -> None:
        if lacks is not None:
            raise UserError(f"model: {name}: {lacks}")

    job.world.agree(raise_if_lacking)
