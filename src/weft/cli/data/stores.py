"""What the verbs that make a store of a store share: their arguments and what they say in the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.formatting import counted

if TYPE_CHECKING:
    from weft.data.stores.operations.new_store import Made


def add_store(parser: argparse.ArgumentParser, *, parts: bool = False, seed: bool = True) -> None:
    """Add STORE, --out and what goes with them.

    Args:
        parts: several folders are made.
        seed: something is drawn at random.
    """
    parser.add_argument("store", metavar="STORE", help="a token store's folder")
    if parts:
        parser.add_argument("--out", required=True, nargs="+", metavar="DIR", help="a folder for each part")
    else:
        parser.add_argument("--out", required=True, metavar="DIR", help="the new store's folder")
    if seed:
        parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random choice (default: 0)")
    parser.add_argument("--tokenizer", metavar="DIR", help="count the bytes of the text, for bits per byte")
    parser.add_argument("--overwrite", action="store_true", help="replace a store that is there")


def make(operation: Callable[..., Made | list[Made]], args: argparse.Namespace, *further: Any, **options: Any) -> int:
    """Make stores of another, by an operation of `weft.data.stores.operations` and what it takes besides; say what was
    made: each line's numbers add up to the input's documents."""
    from weft.data.stores.operations.new_store import Output
    from weft.observe.console import Console

    console, out = Console(), args.out if isinstance(args.out, str) else args.out[0]
    output = Output(Path(out), args.tokenizer, args.overwrite, console)
    found = operation(args.store, output, *further, **options)
    made = found if isinstance(found, list) else [found]
    for one in made:
        info = one.info
        left = "".join(f" + {number:,} {reason}" for reason, number in info.rejected.items())
        total = info.documents + sum(info.rejected.values())
        took = "up to date" if one.seconds is None else f"{one.seconds:,.1f} s"
        kept = f"{info.documents:,} kept" if left else "all kept"
        console.result(
            f"{one.path}: {counted(total, 'document')} = {kept}{left}; {counted(info.tokens, 'token')}; {took}"
        )
    if any(one.info.bytes is None for one in made):
        console.line("the text's bytes are not known now; --tokenizer DIR counts them (bits per byte need it)")
    return 0
