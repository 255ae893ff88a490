"""`weft data split`: splits a store."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.cli.data.stores import add_store_arguments, run_operation

HELP = "split into training and validation data; copies stay together"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Assigns each document to a split by its content and the seed alone. Copies of a document are in the same "
        "split. The sizes of the splits are close to the fractions, but not exact."
    )
    add_store_arguments(parser, several=True)
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument(
        "--fractions",
        type=float,
        nargs="+",
        metavar="F",
        help="fraction of the documents for each --out; the sum must be 1",
    )
    sizes.add_argument(
        "--validation", type=float, metavar="F", help="write two splits; this is the fraction of the second split"
    )


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.split import split
    from weft.errors import UserError

    fractions = args.fractions
    if fractions is None:
        if not 0 < args.validation < 1:
            raise UserError(f"--validation {args.validation:g}: must be above 0 and below 1, such as 0.01")
        fractions = [1 - args.validation, args.validation]
    return run_operation(split, args, [Path(out) for out in args.out], fractions, seed=args.seed)
