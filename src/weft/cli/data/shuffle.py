"""`weft data shuffle`: writes a store's documents in random order."""

from __future__ import annotations

import argparse

from weft.cli.data.stores import add_store_arguments, run_operation

HELP = "write documents in random order"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_store_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from weft.data.stores.operations.shuffle import shuffle

    return run_operation(shuffle, args, seed=args.seed)
