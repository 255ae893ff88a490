"""`weft checkpoint prune`: deletes old checkpoints of a run."""

from __future__ import annotations

import argparse

HELP = "delete old checkpoints of a run"
GROUP = "make"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Deletes all checkpoints of a run except those that the options keep. The last complete checkpoint is never "
        "deleted. A run that is training now is refused."
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--keep-last", type=int, metavar="N", required=True, help="keep the N newest checkpoints")
    parser.add_argument(
        "--keep-every", type=int, metavar="N", help="also keep checkpoints whose step is divisible by N"
    )
    parser.add_argument(
        "--keep-best", type=int, metavar="N", help="also keep the N checkpoints whose validation is best"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from weft.checkpoint.checkpoint_files import Keep
    from weft.checkpoint.inventory import describe, prune_run
    from weft.errors import UserError
    from weft.formatting import byte_size, counted
    from weft.observe.console import Console

    for name, value in (
        ("--keep-last", args.keep_last),
        ("--keep-every", args.keep_every),
        ("--keep-best", args.keep_best),
    ):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: use a positive number")
    console, where, keep = Console(), Path(args.run), Keep(args.keep_last, args.keep_every, args.keep_best or 0)
    sizes = {path: describe(path).bytes for path in prune_run(where, keep, dry_run=True)}
    doomed = list(sizes) if args.dry_run else prune_run(where, keep, dry_run=False)
    for path in doomed:
        console.result(str(path))
    word = "would be deleted" if args.dry_run else "deleted"
    total = byte_size(sum(sizes.get(path, 0) for path in doomed))
    console.line(f"{args.run}: {counted(len(doomed), 'checkpoint')} {word} ({total})")
    return 0
