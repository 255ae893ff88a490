"""Defines the arguments and the output of all subcommands that create a token store from another token store."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.formatting import counted

if TYPE_CHECKING:
    from weft.data.stores.operations.new_store import WrittenStore


def add_store_arguments(parser: argparse.ArgumentParser, *, several: bool = False, seed: bool = True) -> None:
    """Adds the arguments STORE, --out, --seed, --tokenizer and --overwrite to a parser.

    Args:
        several: whether the subcommand writes several stores.
        seed: whether the subcommand uses random numbers.
    """
    parser.add_argument("store", metavar="STORE", help="folder of a token store")
    if several:
        parser.add_argument("--out", required=True, nargs="+", metavar="DIR", help="folder of each new store")
    else:
        parser.add_argument("--out", required=True, metavar="DIR", help="folder of the new store")
    if seed:
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="the store's tokenizer, to count the bytes of text (needed for bits per byte)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing store")


def run_operation(
    operation: Callable[..., WrittenStore | list[WrittenStore]], args: argparse.Namespace, *further: Any, **options: Any
) -> int:
    """Runs an operation of `weft.data.stores.operations` and prints one line per new store. Returns the exit code.

    A line shows how many documents were kept, and how many were left out for each reason. `further` and `options` are
    passed to the operation.
    """
    from weft.data.stores.operations.new_store import Output
    from weft.observe.console import Console

    console, out = Console(), args.out if isinstance(args.out, str) else args.out[0]
    output = Output(Path(out), args.tokenizer, args.overwrite, console)
    result = operation(args.store, output, *further, **options)
    stores = result if isinstance(result, list) else [result]
    for store in stores:
        info = store.info
        left = "".join(f" + {number:,} {reason}" for reason, number in info.rejected.items())
        total = info.documents + sum(info.rejected.values())
        time = "up to date" if store.seconds is None else f"{store.seconds:,.1f} s"
        kept = f"{info.documents:,} kept" if left else "all kept"
        console.result(
            f"{store.path}: {counted(total, 'document')} = {kept}{left}; {counted(info.tokens, 'token')}; {time}"
        )
    if any(store.info.bytes is None for store in stores):
        console.line("the number of bytes of text is unknown; --tokenizer DIR counts them (needed for bits per byte)")
    return 0
