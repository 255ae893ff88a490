"""What all ranks of a run must have alike: its config, its versions, its data."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from typing import Any

import torch

import weft
from weft.config.run import RunConfig
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.formatting import flat
from weft.headers import read_tokenizer_header


def run_facts(config: RunConfig) -> dict[str, str]:
    """Key -> value, as a message shows them.

    Stores and tokenizers are compared by their digests, not by their paths: a machine may have a copy of its own.
    """
    tree = config.as_dict()
    data = tree["data"]
    if isinstance(data["train"], list):
        data["train"] = [source | {"store": _store(source.get("store"))} for source in data["train"]]
    else:
        data["train"] = _store(data["train"])
    if tree.get("tokenizer"):
        tree["tokenizer"] = _digest(lambda: read_tokenizer_header(tree["tokenizer"]).digest)
    tree = flat(tree) | {key: _store(store) for key, store in config.data.held_out_stores.items()}
    facts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in tree.items()}
    python = ".".join(platform.python_version_tuple()[:2])
    return facts | {
        "version of Python": python,
        "version of torch": torch.__version__,
        "version of weft": weft.__version__,
    }


def _store(source: Any) -> Any:
    """The digest of a token store; a custom dataset's section, or None, as it is."""
    if not isinstance(source, str):
        return source

    def digest() -> str:
        info = TokenStore(source).info
        return hashlib.sha256(f"{info.bin_sha256} {info.idx_sha256} {info.mask_sha256}".encode()).hexdigest()

    return _digest(digest)


def _digest(read: Callable[[], str]) -> str:
    try:
        return f"digest {read()[:12]}"
    except UserError as error:  # raised again, on all ranks together, when the data are opened
        return str(error)
