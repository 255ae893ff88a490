"""`weft checkpoint diff`: lists what differs between two checkpoints."""

from __future__ import annotations

import argparse

HELP = "list the tensors and values in which two checkpoints differ"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares weights, optimizer state and saved values of two checkpoints bit for bit. They may have been saved "
        "by different numbers of ranks. Exits with code 0 if nothing differs, and 1 if something differs."
    )
    parser.add_argument("first", metavar="A", help="a checkpoint, or a run directory (its newest checkpoint)")
    parser.add_argument("second", metavar="B", help="a checkpoint, or a run directory (its newest checkpoint)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each difference")


def run(args: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from weft.checkpoint.compare import compare_checkpoints
    from weft.checkpoint.inventory import newest_at
    from weft.formatting import counted
    from weft.observe.console import Console

    console, paths = Console(), [newest_at(given) for given in (args.first, args.second)]
    found, compared = compare_checkpoints(*paths)
    for one in found:
        console.result(json.dumps(asdict(one)) if args.json else f"{one.name}: {one.what}")
    differs = f"{counted(len(found), 'difference')}" if found else "nothing differs"
    console.line(f"{paths[0]} and {paths[1]}: {differs}; {counted(compared, 'tensor')} compared")
    return 1 if found else 0
