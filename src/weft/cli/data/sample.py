"""`weft data sample`: some of a store's documents."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.cli.data.stores import add_store, report

HELP = "draw some of a store's documents at random"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--documents", type=int, metavar="N", help="exactly so many (of preferences: pairs)")
    size.add_argument("--fraction", type=float, metavar="F", help="this share of them, above 0 and at most 1")


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.sample import sample
    from weft.observe.console import Console

    console = Console()
    made = sample(
        args.store,
        Path(args.out),
        documents=args.documents,
        fraction=args.fraction,
        seed=args.seed,
        tokenizer=args.tokenizer,
        overwrite=args.overwrite,
        console=console,
    )
    return report(console, [made])
