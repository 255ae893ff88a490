"""`weft resize`: more, or fewer, tokens for a trained model."""

from __future__ import annotations

import argparse

HELP = "give a model's vocabulary another size"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes the folder OUT, a checkpoint as `weft import` makes one, of SRC's model with another number of rows in "
        "its embedding and head. Old rows and other weights stay as they are; the optimizer's state is left out. "
        "`training.only_rows_from` in a run file trains the new rows alone."
    )
    parser.add_argument("source", metavar="SRC", help="a run, a checkpoint, an imported or a Hugging Face folder")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--vocab-size", type=int, metavar="N", help="rows to have")
    size.add_argument("--tokenizer", metavar="DIR", help="a row for each of its tokens; it is put beside the model")
    parser.add_argument("--multiple", type=int, default=1, metavar="M", help="round rows up to a multiple (64, say)")
    parser.add_argument(
        "--init",
        choices=["mean", "zero", "normal"],
        default="mean",
        help="new rows: the mean of the old ones (default), zeros, or drawn as a new model's",
    )
    parser.add_argument("--shrink", action="store_true", help="allow fewer rows: the last ones are left out")


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError

    for option, value in (("--vocab-size", args.vocab_size), ("--multiple", args.multiple)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: give a number of at least 1")
    from weft.checkpoint.resize import resize
    from weft.observe.console import Console

    console = Console()
    old, new = resize(
        args.source,
        args.out,
        vocab_size=args.vocab_size,
        tokenizer=args.tokenizer,
        multiple=args.multiple,
        init=args.init,
        shrink=args.shrink,
        console=console,
    )
    rest = f"; new: {old} to {new - 1}, as training.only_rows_from: {old} trains them alone" if new > old else ""
    console.result(f"{args.out}: {old:,} -> {new:,} rows{rest}")
    return 0
