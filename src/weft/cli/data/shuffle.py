"""`weft data shuffle`: a store's documents in random order."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.cli.data.stores import add_store, report

HELP = "a store's documents in a random order that a seed fixes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.shuffle import shuffle
    from weft.observe.console import Console

    console = Console()
    made = shuffle(
        args.store, Path(args.out), seed=args.seed, tokenizer=args.tokenizer, overwrite=args.overwrite, console=console
    )
    return report(console, [made])
