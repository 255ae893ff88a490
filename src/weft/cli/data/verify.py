"""`weft data verify`: verifies every byte of token stores."""

from __future__ import annotations

import argparse

HELP = "read every byte of token stores and report damage"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stores", nargs="+", metavar="STORE", help="folders of token stores")


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.verify import verify
    from weft.observe.console import Console

    console, damaged = Console(), 0
    for path in args.stores:
        problems = verify(path, console)
        damaged += bool(problems)
        for line in (*problems, *problems.unchecked):
            console.line(line)
        console.result(f"{path}: {problems.verdict}")
    return 2 if damaged else 0
