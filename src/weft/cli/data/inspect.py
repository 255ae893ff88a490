"""`weft data inspect`: describes a token store."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "show counts, lengths and decoded samples of a token store"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="a token store's folder")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer that decodes the samples")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="number of documents to show (default: 2)")
    parser.add_argument("--verify", action="store_true", help="also verify all bytes, as `weft data verify` does")


def run(args: argparse.Namespace) -> int:
    from weft.data.inspect import describe
    from weft.errors import UserError
    from weft.observe.console import Console

    if args.samples < 0:
        raise UserError(f"--samples {args.samples}: give 0 or more")
    for line in describe(Path(args.store), args.tokenizer, samples=args.samples):
        print(line)
    if not args.verify:
        return 0
    from weft.data.stores.operations.verify import verify

    console = Console()
    wrong = verify(args.store, console)
    for line in (*wrong, *wrong.unchecked):
        console.line(line)
    if not wrong:
        print(f"verified   {wrong.verdict}")
    return 2 if wrong else 0
