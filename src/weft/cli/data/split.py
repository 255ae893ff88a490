"""`weft data split`: a store in parts."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.cli.data.stores import add_store, make

HELP = "parts for training and validation; copies stay together"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A document's part depends on its content and the seed alone, so copies of it are all in one part, and the "
        "parts' sizes are near the fractions, not exactly these."
    )
    add_store(parser, parts=True)
    sizes = parser.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--fractions", type=float, nargs="+", metavar="F", help="one for each --out; their sum is 1")
    sizes.add_argument("--validation", type=float, metavar="F", help="two parts, of which the second has this share")


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.split import split
    from weft.errors import UserError

    fractions = args.fractions
    if fractions is None:
        if not 0 < args.validation < 1:
            raise UserError(f"--validation {args.validation:g}: a share above 0 and below 1 is needed, such as 0.01")
        fractions = [1 - args.validation, args.validation]
    return make(split, args, [Path(out) for out in args.out], fractions, seed=args.seed)
