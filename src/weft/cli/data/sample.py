"""`weft data sample`: draws a random sample of a store's documents."""

from __future__ import annotations

import argparse

from weft.cli.data.stores import add_store_arguments, run_operation

HELP = "draw a random sample of documents"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_arguments(parser)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--documents", type=int, metavar="N", help="number of documents to draw (for preferences: pairs)")
    size.add_argument(
        "--fraction", type=float, metavar="F", help="fraction of the documents to draw, above 0 and at most 1"
    )


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.sample import sample

    return run_operation(sample, args, documents=args.documents, fraction=args.fraction, seed=args.seed)
