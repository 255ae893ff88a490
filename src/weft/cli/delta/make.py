"""`weft delta make`: writes a model as its differences from another one."""

from __future__ import annotations

import argparse

from weft.cli.import_ import ALLOW_PICKLE
from weft.formatting import counted

HELP = "write the differences of a model from its base"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the folder OUT, from which, with BASE, `weft delta apply` restores MODEL bit for bit. BASE and MODEL "
        "are runs, checkpoints, imported or Hugging Face folders. OUT has the compressed differences of the tensors' "
        "bit patterns, a SHA-256 of each, and MODEL's config and tokenizer; optimizer state is not included."
    )
    parser.add_argument("base", metavar="BASE", help="the model that MODEL was derived from")
    parser.add_argument("model", metavar="MODEL", help="the model to write as a delta")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--allow-pickle", action="store_true", help=ALLOW_PICKLE)


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.delta.make import make
    from weft.observe.console import Console

    console = Console()
    made = make(args.base, args.model, args.out, allow_pickle=args.allow_pickle, console=console)
    share = f", {made.bytes / made.model_bytes:.0%} of the model's {made.model_bytes:,}" if made.model_bytes else ""
    console.result(
        f"{args.out}: {counted(made.tensors, 'tensor')} in {made.bytes:,} bytes{share}; {made.same:,} unchanged"
    )
    return 0
