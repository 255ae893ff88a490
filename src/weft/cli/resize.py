"""`weft resize`: changes the vocabulary size of a trained model."""

from __future__ import annotations

import argparse

HELP = "change the vocabulary size of a model"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the model of SRC, with another number of rows in its embedding and head, to the folder OUT. OUT is a "
        "checkpoint without optimizer state, as `weft import` writes. Old rows and all other weights are unchanged. "
        "To train only the new rows, set `training.only_rows_from` in a run file."
    )
    parser.add_argument("source", metavar="SRC", help="a run, a checkpoint, an imported or a Hugging Face folder")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--vocab-size", type=int, metavar="N", help="new number of rows")
    size.add_argument("--tokenizer", metavar="DIR", help="the new tokenizer: one row for each of its tokens")
    parser.add_argument("--multiple", type=int, default=1, metavar="M", help="round up to a multiple of M, such as 64")
    parser.add_argument(
        "--init",
        choices=["mean", "zero", "normal"],
        default="mean",
        help="new rows: the mean of the old rows (default), zeros, or random values as in a new model",
    )
    parser.add_argument("--shrink", action="store_true", help="allow fewer rows: the last rows are dropped")


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError

    for option, value in (("--vocab-size", args.vocab_size), ("--multiple", args.multiple)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: use a number of at least 1")
    from weft.checkpoint.resize import resize
    from weft.observe.console import Console

    console, settings = Console(), vars(args).copy()
    del settings["words"]
    old, new = resize(settings.pop("source"), settings.pop("out"), console=console, **settings)
    hint = (
        f"; new rows: {old} to {new - 1}; to train only new rows, set training.only_rows_from: {old}"
        if new > old
        else ""
    )
    console.result(f"{args.out}: {old:,} -> {new:,} rows{hint}")
    return 0
