"""A store without the documents that are too short, too long, or not to the taste of a user's function."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.stores.operations.new_store import Made, Output, Part, arguments_of, make
from weft.data.stores.operations.scan import Block, open_items, scan
from weft.data.stores.operations.text_bytes import open_tokenizer
from weft.errors import UserError

Test = Callable[[np.ndarray, int], bool]  # a document's ids without its end, its number -> whether it is kept


def filter_store(
    path: str | Path,
    output: Output,
    *,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    function: str | None = None,
) -> Made:
    """Keep the documents that pass all tests; how many did not, and why, is in `store.json`.

    Args:
        min_tokens, max_tokens: of a document without its end-of-document token, both included.
        function: `module:name`, a function of one argument that says whether a document is kept: called `text`, it gets
            the decoded text (then `tokenizer` is needed); otherwise its ids, a read-only array `[tokens]`.
            A preference pair is kept if both of its documents are.

    Raises:
        UserError: no store, no such function, one that failed (with the document's number), or no document left.
    """
    store = open_items(path)
    step = store.info.item_documents
    if min_tokens is None and max_tokens is None and function is None:
        raise UserError("nothing to filter by; name --min-tokens, --max-tokens or --function")
    for name, number in (("min", min_tokens), ("max", max_tokens)):
        if number is not None and number < 0:
            raise UserError(f"--{name}-tokens {number}: 0 or more; the end-of-document token does not count")
    test = _load(function, store.info.tokenizer_digest, output.tokenizer) if function is not None else None

    def fill(part: Part) -> None:
        with output.console.progress(store.num_tokens, "filtering", unit="token") as bar:
            for block in scan(store, bar.update):
                keep = np.ones(len(block.lengths) // step, bool)

                def drop(passed: np.ndarray, reason: str, keep: np.ndarray = keep) -> None:
                    failed = keep & ~passed.reshape(-1, step).all(1)
                    if failed.any():
                        part.left_out[reason] += step * int(np.count_nonzero(failed))
                        keep &= ~failed

                if min_tokens is not None:
                    drop(block.lengths - 1 >= min_tokens, f"fewer than {min_tokens:,} tokens")
                if max_tokens is not None:
                    drop(block.lengths - 1 <= max_tokens, f"more than {max_tokens:,} tokens")
                if test is not None:
                    drop(_tested(block, test, np.repeat(keep, step)), f"left out by {function}")
                if keep.any():
                    part.add(block.choose(np.repeat(keep, step)))

    limits = {"min_tokens": min_tokens, "max_tokens": max_tokens, "function": function}
    made_from = arguments_of(store, "filter", **limits)
    # A function may have changed since: its store is made again, never taken for what it would give now.
    return make(store, output, made_from, fill, reusable=function is None)


def _tested(block: Block, test: Test, wanted: np.ndarray) -> np.ndarray:
    passed = np.ones(len(block.lengths), bool)
    for number, ids in enumerate(block.documents()):
        if wanted[number]:
            passed[number] = test(ids[:-1], block.first + number)
    return passed


def _load(function: str, digest: str | None, tokenizer: str | Path | None) -> Test:
    """The user's function, with its failures told in one line."""
    module, _, name = function.partition(":")
    if not module or not name:
        raise UserError(f"--function {function}: write it as module:name")
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's module does when it is imported, sys.exit() among it
        raise UserError(f"--function {function}: {type(error).__name__}: {error}; mend the module") from error
    if not callable(found):
        raise UserError(f"--function {function}: the module has no function {name!r}; check the name")
    wants_text = next(iter(inspect.signature(found).parameters), None) == "text"
    if wants_text and tokenizer is None:
        raise UserError(f"--function {function} takes text; name the --tokenizer to decode with")
    decoder = open_tokenizer(tokenizer, digest) if wants_text and tokenizer is not None else None

    def test(ids: np.ndarray, number: int) -> bool:
        given = ids if decoder is None else decoder.decode(ids.tolist())
        try:
            return bool(found(given))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's function may raise anything, SystemExit too
            told = " ".join(f"{type(error).__name__}: {error}".split())
            what = f"document {number:,}: --function {function} failed: {told}; nothing was written"
            raise UserError(what) from error

    return test
