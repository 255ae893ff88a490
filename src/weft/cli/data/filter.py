"""`weft data filter`: removes documents from a store."""

from __future__ import annotations

import argparse

from weft.cli.data.stores import add_store_arguments, run_operation

HELP = "keep documents by length or by a custom function"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_arguments(parser, seed=False)
    parser.add_argument(
        "--min-tokens",
        type=int,
        metavar="N",
        help="minimum length of a document in tokens, without the end-of-document token",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum length of a document in tokens, without the end-of-document token",
    )
    parser.add_argument(
        "--function",
        metavar="MODULE:NAME",
        help="a function that returns whether to keep a document: name(ids), or name(text), which needs --tokenizer",
    )


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.filter import filter_store

    options = {"min_tokens": args.min_tokens, "max_tokens": args.max_tokens, "function": args.function}
    return run_operation(filter_store, args, **options)
