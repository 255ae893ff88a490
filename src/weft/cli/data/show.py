"""`weft data show`: shows documents of a token store as text, and which tokens are trained on."""

from __future__ import annotations

import argparse
import os
import sys

HELP = "show documents of a token store as text, and which tokens are trained on"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="a token store's folder")
    parser.add_argument(
        "--masks",
        action="store_true",
        help="show the tokens that are trained on in color (between {+ and +} if the output is not a terminal)",
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="the store's tokenizer (default: known for stores that a run packed)"
    )
    parser.add_argument(
        "--document", type=int, action="append", metavar="I", help="index of a document to show; can be repeated"
    )
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="number of documents to show (default: 3)")


def run(args: argparse.Namespace) -> int:
    from weft.data.conversations.show_mask import GREEN, MARKS
    from weft.data.show import show
    from weft.errors import UserError

    if args.samples < 0:
        raise UserError(f"--samples {args.samples}: give 0 or more")
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    marks = (GREEN if color else MARKS) if args.masks else None
    for text in show(args.store, args.tokenizer, numbers=args.document, samples=args.samples, marks=marks):
        print(text)
    return 0
