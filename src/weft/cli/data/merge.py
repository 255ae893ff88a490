"""`weft data merge`: concatenates token stores."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.formatting import counted

HELP = "concatenate stores, such as the shards of a pack"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Concatenates token stores in the given order. All stores must have been packed with the same tokenizer. "
        "Merging the shards 1/N to N/N of a pack gives the same bytes as a single pack."
    )
    parser.add_argument("stores", nargs="+", metavar="STORE", help="folders of token stores")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the merged store")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing store")


def run(args: argparse.Namespace) -> int:
    from weft.data.packing.merge import merge
    from weft.observe.console import Console

    console = Console()
    info = merge(args.stores, Path(args.out), overwrite=args.overwrite, console=console)
    console.result(
        f"{args.out}: {counted(info.documents, 'document')}, {counted(info.tokens, 'token')} "
        f"from {counted(len(args.stores), 'store')}, {sum(info.rejected.values()):,} rejected"
    )
    return 0
