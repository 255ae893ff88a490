"""`weft checkpoint list`: lists the checkpoints of a run."""

from __future__ import annotations

import argparse

HELP = "list the checkpoints of a run, with size, time and state"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints each checkpoint's step, size, time of its save, and state. Only the names and sizes of files are "
        "checked; `weft checkpoint verify` reads their contents. With `checkpoint.keep_best`, the metric of each "
        "checkpoint's validation is shown, and the best one is marked. Interrupted saves, which the next save deletes, "
        "are not listed."
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each checkpoint")


def run(args: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from weft.checkpoint.best import read_values
    from weft.checkpoint.checkpoint_files import list_checkpoints, step_of
    from weft.checkpoint.inventory import checkpoints_folder, describe
    from weft.formatting import byte_size
    from weft.observe.console import Console

    console = Console()
    folder = checkpoints_folder(Path(args.run))
    found = [describe(path) for path in list_checkpoints(folder)]
    noted, rows = read_values(folder), []
    metric, best = noted.metric, noted.best([step_of(one.path) or 0 for one in found])[:1]
    for one in found:
        state = "complete" if one.damage is None else f"damaged ({one.damage.file.name}: {one.damage.what})"
        time, step = one.saved.isoformat(" ", "seconds"), step_of(one.path)
        if step in best:
            state += ", best"
        if args.json:
            fields = {"step": step, "bytes": one.bytes, "saved": time, "complete": one.damage is None}
            fields |= {metric: noted.by_step.get(step or 0), "best": step in best} if metric else {}
            console.result(json.dumps(fields | {"state": state, "path": str(one.path)}))
        value = [f"{noted.by_step[step]:.4f}" if step in noted.by_step else "-"] if metric else []
        rows.append((step, byte_size(one.bytes), time, *value, state, one.path.name))
    if not args.json and rows:
        console.table(["step", "size", "saved", *([metric] if metric else []), "state", "name"], rows)
    elif not rows:
        console.line(f"{args.run}: no checkpoint is saved yet")
    return 0
