"""`weft data dedup`: a store without copies."""

from __future__ import annotations

import argparse

from weft.cli.data.stores import add_store, make

HELP = "documents without copies, exact or near"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser, seed=False)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--exact", action="store_true", help="what has the same ids (default)")
    kind.add_argument("--near", action="store_true", help="also what shares most of its n-grams, by MinHash")
    parser.add_argument("--threshold", type=float, metavar="F", help="of --near: the least similarity (default: 0.8)")
    parser.add_argument("--ngram", type=int, metavar="N", help="of --near: tokens of an n-gram, 1 to 64 (default: 5)")


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError

    for name in ("threshold", "ngram"):
        if getattr(args, name) is not None and not args.near:
            raise UserError(f"--{name}: is of near duplicates; add --near, or leave it out")
    from weft.data.stores.operations.dedup import dedup

    return make(
        dedup,
        args,
        near=args.near,
        threshold=0.8 if args.threshold is None else args.threshold,
        ngram=5 if args.ngram is None else args.ngram,
    )
