"""`weft data filter`: a store without some documents."""

from __future__ import annotations

import argparse

from weft.cli.data.stores import add_store, make

HELP = "documents by length, or by a function of yours"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser, seed=False)
    parser.add_argument("--min-tokens", type=int, metavar="N", help="the fewest, without the end-of-document token")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the most")
    parser.add_argument(
        "--function",
        metavar="MODULE:NAME",
        help="says whether a document is kept: name(ids), or name(text), which needs --tokenizer",
    )


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.filter import filter_store

    return make(filter_store, args, min_tokens=args.min_tokens, max_tokens=args.max_tokens, function=args.function)
