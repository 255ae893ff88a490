"""`weft delta apply`: restores a model from a base and a delta."""

from __future__ import annotations

import argparse

from weft.cli.import_ import ALLOW_PICKLE
from weft.formatting import counted

HELP = "restore a model from its base and a delta"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the folder OUT: DELTA's model, bit for bit, as a checkpoint or a Hugging Face folder. Every tensor of "
        "BASE, of DELTA and of the result is checked by its SHA-256. DELTA may also be a Hugging Face folder of "
        "plain differences, as used by FastChat's apply_delta: they are added in float32 and cannot be verified."
    )
    parser.add_argument("base", metavar="BASE", help="the model that DELTA was made against")
    parser.add_argument("delta", metavar="DELTA", help="a folder of `weft delta make`, or of plain differences")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--allow-pickle", action="store_true", help=ALLOW_PICKLE)


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.delta.apply import apply
    from weft.checkpoint.delta.delta_format import is_delta
    from weft.checkpoint.delta.plain import apply_plain
    from weft.observe.console import Console

    console = Console()
    work = apply if is_delta(args.delta) else apply_plain
    tensors, size = work(args.base, args.delta, args.out, allow_pickle=args.allow_pickle, console=console)
    checked = "checked by their SHA-256" if work is apply else "of plain differences, which cannot be verified"
    console.result(f"{args.out}: {counted(tensors, 'tensor')}, {size:,} bytes, {checked}")
    return 0
