"""`weft delta apply`: restores a model from its base model and a delta."""

from __future__ import annotations

import argparse

from weft.cli.import_ import ALLOW_PICKLE
from weft.formatting import counted

HELP = "restore a model from its base model and a delta"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Restores the model of DELTA, bit for bit, and writes it to the folder OUT: a checkpoint or a Hugging Face "
        "folder. The SHA-256 of every tensor of BASE, DELTA and OUT is checked. DELTA can also be a Hugging Face "
        "folder of plain differences, as in FastChat's apply_delta. These are added in float32 and cannot be verified."
    )
    parser.add_argument("base", metavar="BASE", help="the base model against which DELTA was made")
    parser.add_argument(
        "delta", metavar="DELTA", help="a folder that `weft delta make` wrote, or a folder of plain differences"
    )
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
    checked = "all SHA-256 digests match" if work is apply else "plain differences, which cannot be verified"
    console.result(f"{args.out}: {counted(tensors, 'tensor')}, {size:,} bytes, {checked}")
    return 0
