"""`weft checkpoint verify`: reads every byte of checkpoints."""

from __future__ import annotations

import argparse

HELP = "read every byte of checkpoints and report damage"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares every file of the checkpoints with the SHA-256 that the save recorded. Prints the first damaged file "
        "of each damaged checkpoint. Exits with code 2 if a checkpoint is damaged."
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="run directories (all of their checkpoints) or checkpoints"
    )


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.checkpoint_files import find_damage
    from weft.checkpoint.inventory import checkpoints_at, describe
    from weft.formatting import byte_size
    from weft.observe.console import Console

    console, damaged = Console(), 0
    for path in (found for given in args.paths for found in checkpoints_at(given)):
        damage = find_damage(path)
        damaged += damage is not None
        if damage is None:
            console.result(f"{path}: undamaged ({byte_size(describe(path).bytes)})")
        else:
            console.result(f"{damage.file}: damaged checkpoint: {damage.what}")
    return 2 if damaged else 0
