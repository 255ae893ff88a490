"""`weft delta make`: a model as its differences from another one."""

from __future__ import annotations

import argparse

from weft.formatting import counted

HELP = "write how a model differs from the one that it was made from"
GROUP = "work"
PICKLE = (
    "take .bin files of Hugging Face folders that have no safetensors. A pickle can run any program while it is read; "
    "these are read by torch's restricted unpickler, which makes tensors and nothing else: for files that you trust"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes the folder OUT, from which, with BASE, `weft delta apply` makes MODEL again, bit for bit. BASE and "
        "MODEL are runs, checkpoints, imported or Hugging Face folders. The differences are those of the tensors' bit "
        "patterns, compressed, with a SHA-256 of each; MODEL's config and tokenizer go along, optimizer state does not."
    )
    parser.add_argument("base", metavar="BASE", help="the model that MODEL was made from")
    parser.add_argument("model", metavar="MODEL", help="the model to be written as a delta")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--allow-pickle", action="store_true", help=PICKLE)


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.delta.make import make
    from weft.observe.console import Console

    console = Console()
    made = make(args.base, args.model, args.out, allow_pickle=args.allow_pickle, console=console)
    share = f", {made.bytes / made.model_bytes:.0%} of the model's {made.model_bytes:,}" if made.model_bytes else ""
    console.result(
        f"{args.out}: {counted(made.tensors, 'tensor')} in {made.bytes:,} bytes{share}; "
        f"{made.same:,} are as in the base"
    )
    return 0
