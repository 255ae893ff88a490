"""`weft delta make`: writes the differences of a model from its base model."""

from __future__ import annotations

import argparse

from weft.cli.import_ import ALLOW_PICKLE
from weft.formatting import counted

HELP = "write the differences of a model from its base model"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the differences of MODEL from BASE to the folder OUT. `weft delta apply` restores MODEL from BASE and "
        "OUT, bit for bit. BASE and MODEL are runs, checkpoints, imported folders or Hugging Face folders. OUT "
        "contains the compressed differences of the tensors' bit patterns, the SHA-256 of each tensor, and MODEL's "
        "config and tokenizer, but no optimizer state."
    )
    parser.add_argument("base", metavar="BASE", help="the base model, from which MODEL was derived")
    parser.add_argument("model", metavar="MODEL", help="the model whose differences to write")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--allow-pickle", action="store_true", help=ALLOW_PICKLE)


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.delta.make import make
    from weft.observe.console import Console

    console = Console()
    made = make(args.base, args.model, args.out, allow_pickle=args.allow_pickle, console=console)
    share = (
        f", {made.bytes / made.model_bytes:.0%} of the model's {made.model_bytes:,} bytes" if made.model_bytes else ""
    )
    console.result(
        f"{args.out}: {counted(made.tensors, 'tensor')} in {made.bytes:,} bytes{share}; {made.same:,} tensors unchanged"
    )
    return 0
