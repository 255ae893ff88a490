"""`weft data verify`: every byte of token stores."""

from __future__ import annotations

import argparse

HELP = "read every byte of token stores and say what is wrong where"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stores", nargs="+", metavar="STORE", help="token stores' folders")


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.verify import verify
    from weft.observe.console import Console

    console, damaged = Console(), 0
    for path in args.stores:
        wrong = verify(path, console)
        damaged += bool(wrong)
        for line in (*wrong, *wrong.unchecked):
            console.line(line)
        console.result(f"{path}: {wrong.verdict}")
    return 2 if damaged else 0
