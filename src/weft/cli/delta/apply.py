"""`weft delta apply`: base + delta = model."""

from __future__ import annotations

import argparse

from weft.cli.delta.make import PICKLE
from weft.formatting import counted

HELP = "make a model from the one that it was made from, and the differences"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes the folder OUT: the model that DELTA was made of, a checkpoint or a Hugging Face folder as that was, "
        "bit for bit; every tensor of BASE, of DELTA and of the result is checked by its SHA-256. DELTA may also be a "
        "Hugging Face folder of plain differences, as FastChat's apply_delta takes them: they are added in float32, "
        "and nothing can be checked."
    )
    parser.add_argument("base", metavar="BASE", help="the model that DELTA was made against")
    parser.add_argument("delta", metavar="DELTA", help="what `weft delta make` wrote, or a folder of plain differences")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--allow-pickle", action="store_true", help=PICKLE)


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.delta.apply import apply
    from weft.checkpoint.delta.delta_format import is_delta
    from weft.checkpoint.delta.plain import apply_plain
    from weft.observe.console import Console

    console = Console()
    work = apply if is_delta(args.delta) else apply_plain
    tensors, size = work(args.base, args.delta, args.out, allow_pickle=args.allow_pickle, console=console)
    checked = "checked by their SHA-256" if work is apply else "of plain differences, so nothing could be checked"
    console.result(f"{args.out}: {counted(tensors, 'tensor')}, {size:,} bytes, {checked}")
    return 0
