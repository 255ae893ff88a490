"""`weft data merge`: stores put end to end."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.formatting import counted

HELP = "put stores end to end, shards among them"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Concatenates token stores in the order given. They must have been packed with the same tokenizer; the shards "
        "1/n to n/n of one pack give the same bytes as the pack of all."
    )
    parser.add_argument("stores", nargs="+", metavar="STORE", help="folders that `weft data pack` wrote")
    parser.add_argument("--out", required=True, metavar="DIR", help="the merged store's folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a store that is there")


def run(args: argparse.Namespace) -> int:
    from weft.data.packing.merge import merge
    from weft.observe.console import Console

    console = Console()
    info = merge(args.stores, Path(args.out), overwrite=args.overwrite, console=console)
    console.result(
        f"{args.out}: {counted(info.documents, 'document')}, {counted(info.tokens, 'token')} "
        f"of {counted(len(args.stores), 'store')}, {sum(info.rejected.values()):,} rejected"
    )
    return 0
