"""`weft data inspect`: a look at a token store."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "counts, lengths and decoded samples of a token store"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="a folder that `weft data pack` wrote")
    parser.add_argument("--tokenizer", metavar="DIR", help="decode samples with this tokenizer")
    parser.add_argument("--samples", type=int, default=2, metavar="N", help="documents to show (default: 2)")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare it with the store's digests")


def run(args: argparse.Namespace) -> int:
    from weft.data.inspect import describe

    for line in describe(Path(args.store), args.tokenizer, samples=args.samples, verify=args.verify):
        print(line)
    return 0
