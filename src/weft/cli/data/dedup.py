"""`weft data dedup`: removes duplicates from a store."""

from __future__ import annotations

import argparse

from weft.cli.data.stores import add_store_arguments, run_operation

HELP = "remove exact or near duplicates"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_arguments(parser, seed=False)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--exact", action="store_true", help="remove documents with the same ids (default)")
    kind.add_argument("--near", action="store_true", help="also remove documents that share most n-grams (MinHash)")
    parser.add_argument("--threshold", type=float, metavar="F", help="with --near: minimum similarity (default: 0.8)")
    parser.add_argument("--ngram", type=int, metavar="N", help="with --near: tokens per n-gram, 1 to 64 (default: 5)")


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError

    for name in ("threshold", "ngram"):
        if getattr(args, name) is not None and not args.near:
            raise UserError(f"--{name}: applies to near duplicates only; add --near, or remove --{name}")
    from weft.data.stores.operations.dedup import dedup

    return run_operation(
        dedup,
        args,
        near=args.near,
        threshold=0.8 if args.threshold is None else args.threshold,
        ngram=5 if args.ngram is None else args.ngram,
    )
