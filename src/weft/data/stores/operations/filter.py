"""Filters a store's documents by length or by a custom function."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.stores.operations.new_store import Output, StoreWriter, WrittenStore, make_store, provenance
from weft.data.stores.operations.scan import Block, open_items, scan
from weft.data.stores.operations.text_bytes import open_tokenizer
from weft.errors import UserError

Predicate = Callable[
    [np.ndarray, int], bool
]  # (ids without the end-of-document token, document number) -> whether to keep the document


def filter_store(
    path: str | Path,
    output: Output,
    *,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    function: str | None = None,
) -> WrittenStore:
    """Writes a store of the documents that pass all conditions. `store.json` counts the removed documents by reason.

    A preference pair is kept if both documents pass.

    Args:
        min_tokens, max_tokens: minimum and maximum number of tokens of a document, without the end-of-document token.
        function: `module:name` of a function of one argument that returns whether to keep a document. If the argument
            is named `text`, it is the decoded text, which requires `output.tokenizer`; otherwise it is the ids, a
            read-only array `[tokens]`.

    Raises:
        UserError: `path` is not a store, the function does not exist or fails (the message names the document), no
            document passes, or `output.path` exists and must not be replaced.
    """
    store = open_items(path)
    step = store.info.item_documents
    if min_tokens is None and max_tokens is None and function is None:
        raise UserError("no condition to filter by; set --min-tokens, --max-tokens or --function")
    for name, number in (("min", min_tokens), ("max", max_tokens)):
        if number is not None and number < 0:
            raise UserError(f"--{name}-tokens {number}: must be 0 or more (the end-of-document token is not counted)")
    predicate = _load(function, store.info.tokenizer_digest, output.tokenizer) if function is not None else None

    def fill(writer: StoreWriter) -> None:
        with output.console.progress(store.num_tokens, "filtering", unit="token") as bar:
            for block in scan(store, bar.update):
                keep = np.ones(len(block.lengths) // step, bool)

                def drop(passed: np.ndarray, reason: str, keep: np.ndarray = keep) -> None:
                    failed = keep & ~passed.reshape(-1, step).all(1)
                    if failed.any():
                        writer.left_out[reason] += step * int(np.count_nonzero(failed))
                        keep &= ~failed

                if min_tokens is not None:
                    drop(block.lengths - 1 >= min_tokens, f"fewer than {min_tokens:,} tokens")
                if max_tokens is not None:
                    drop(block.lengths - 1 <= max_tokens, f"more than {max_tokens:,} tokens")
                if predicate is not None:
                    drop(_apply(predicate, block, np.repeat(keep, step)), f"left out by {function}")
                if keep.any():
                    writer.add(block.select(np.repeat(keep, step)))

    made_from = provenance(store, "filter", min_tokens=min_tokens, max_tokens=max_tokens, function=function)
    # The function's code can have changed, so an existing store is never reused.
    return make_store(store, output, made_from, fill, reusable=function is None)


def _apply(predicate: Predicate, block: Block, candidates: np.ndarray) -> np.ndarray:
    """Applies `predicate` to the documents for which `candidates` is true.

    Returns a bool array `[documents]`, which is False for each document that the predicate rejects.
    """
    passed = np.ones(len(block.lengths), bool)
    for number, ids in enumerate(block.documents()):
        if candidates[number]:
            passed[number] = predicate(ids[:-1], block.first + number)
    return passed


def _load(function: str, digest: str | None, tokenizer: str | Path | None) -> Predicate:
    """Imports a custom function `module:name`, and wraps it so that its exceptions become UserErrors.

    Args:
        digest: digest of the store's tokenizer, which `tokenizer` must have.
        tokenizer: tokenizer that decodes documents for a function whose argument is named `text`.
    """
    module, _, name = function.partition(":")
    if not module or not name:
        raise UserError(f"--function {function}: must have the form module:name")
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        custom: Any = getattr(importlib.import_module(module), name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing a custom module can raise anything, including SystemExit
        raise UserError(f"--function {function}: {type(error).__name__}: {error}; fix the module") from error
    if not callable(custom):
        raise UserError(f"--function {function}: the module has no function {name!r}; check the name")
    takes_text = next(iter(inspect.signature(custom).parameters), None) == "text"
    if takes_text and tokenizer is None:
        raise UserError(f"--function {function} takes text, which is decoded with a tokenizer; set --tokenizer")
    decoder = open_tokenizer(tokenizer, digest) if takes_text and tokenizer is not None else None

    def predicate(ids: np.ndarray, number: int) -> bool:
        argument = ids if decoder is None else decoder.decode(ids.tolist())
        try:
            return bool(custom(argument))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a custom function can raise anything, including SystemExit
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"document {number:,}: --function {function} failed: {reason}; nothing was written; fix the function"
            ) from error

    return predicate
