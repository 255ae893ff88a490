"""`weft data inspect`: a look at a token store."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "counts, lengths and decoded samples of a token store"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="a folder that `weft data pack` wrote")
    parser.add_argument("--tokenizer", metavar="DIR", help="decode samples with this tokenizer")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="documents to show (default: 2)")
    parser.add_argument("--verify", action="store_true", help="read every byte as well, as `weft data verify` does")


def run(args: argparse.Namespace) -> int:
    from weft.data.inspect import describe
    from weft.errors import UserError
    from weft.observe.console import Console

    if args.samples < 0:
        raise UserError(f"--samples {args.samples}: 0 or more")
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
