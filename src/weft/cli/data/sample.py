"""`weft data sample`: some of a store's documents."""

from __future__ import annotations

import argparse

from weft.cli.data.stores import add_store, make

HELP = "some documents, drawn at random"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--documents", type=int, metavar="N", help="exactly so many (of preferences: pairs)")
    size.add_argument("--fraction", type=float, metavar="F", help="this share of them, above 0 and at most 1")


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.sample import sample

    return make(sample, args, documents=args.documents, fraction=args.fraction, seed=args.seed)
