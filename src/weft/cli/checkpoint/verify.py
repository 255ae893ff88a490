"""`weft checkpoint verify`: reads every byte of checkpoints."""

from __future__ import annotations

import argparse

HELP = "read every byte of checkpoints and report damage"
GROUP = "look"
SHOWN = 5  # entries that a checkpoint does not list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares every file of the checkpoints with the SHA-256 that the save recorded. Prints the first damaged file "
        "of each damaged checkpoint. Of a run, also reads the files of local checkpoints on this host "
        "(checkpoint.local), and compares the sizes of copies in the object store (checkpoint.remote). Names other "
        "files in the folders of checkpoints, which are no damage. Exits with code 2 if a checkpoint is damaged, or a "
        "place cannot be read."
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="run directories (all of their checkpoints), checkpoints, or URLs of copies (checkpoint.remote/NAME)",
    )
    parser.add_argument("--store", action="store_true", help="also read every byte of copies in the object store")


def run(args: argparse.Namespace) -> int:
    from weft.checkpoint.places import checkpoints_to_verify
    from weft.formatting import byte_size, counted, first_few
    from weft.observe.console import Console

    console, failed = Console(), 0
    for given in args.paths:
        found, problems = checkpoints_to_verify(given, all_bytes=args.store)
        for one in found:
            damage = one.verify()
            fine = f"undamaged ({byte_size(one.bytes)})" if one.complete else one.state
            console.result(damage or f"{one.path}: {fine}")
            failed += damage is not None
            if one.unlisted:
                verb = "is" if len(one.unlisted) == 1 else "are"
                console.warning(
                    f"{one.path}: {counted(len(one.unlisted), 'entry', 'entries')} {verb} not in checksums.json: "
                    f"{first_few(one.unlisted, SHOWN, ', ')}; Weft does not read them: move or delete them"
                )
        for problem in problems:
            console.warning(problem)
        failed += len(problems)
    return 2 if failed else 0
