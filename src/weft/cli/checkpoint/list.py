"""`weft checkpoint list`: lists the checkpoints of a run."""

from __future__ import annotations

import argparse

HELP = "list the checkpoints of a run, with size, time and state"
GROUP = "look"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints each checkpoint's step, size, time of its save, and state: of those in the run directory, of local "
        "ones on this host (checkpoint.local), and of copies in the object store (checkpoint.remote). Only the names "
        "and sizes of files are checked; `weft checkpoint verify` reads their contents. With `checkpoint.keep_best`, "
        "the metric of each checkpoint's validation is shown, and the best one is marked. Interrupted saves, which the "
        "next save deletes, are not listed."
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or the URL of its copies (checkpoint.remote/NAME)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each checkpoint")


def run(args: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from weft.checkpoint.best import Values, read_values
    from weft.checkpoint.checkpoint_files import FOLDER, checkpoint_name
    from weft.checkpoint.places import RUN, checkpoints_everywhere, is_url
    from weft.formatting import byte_size
    from weft.observe.console import Console

    console = Console()
    found, problems = checkpoints_everywhere(args.run)
    path = Path(args.run)
    noted = Values("", "min", {}) if is_url(args.run) else read_values(path if path.name == FOLDER else path / FOLDER)
    metric, best = noted.metric, noted.best([one.step for one in found if one.place == RUN])[:1]
    places, rows = {one.place for one in found} != {RUN}, []
    for one in found:
        state = one.state + (", best" if one.step in best and one.place == RUN else "")
        time = "-" if one.saved is None else one.saved.isoformat(" ", "seconds")
        if args.json:
            fields = {"step": one.step, "bytes": one.bytes, "saved": time, "complete": one.complete}
            fields |= {metric: noted.by_step.get(one.step), "best": one.step in best} if metric else {}
            console.result(json.dumps(fields | {"state": state, "place": one.place, "path": one.path}))
        value = [f"{noted.by_step[one.step]:.4f}" if one.step in noted.by_step else "-"] if metric else []
        where = [one.place] if places else []
        rows.append((one.step, byte_size(one.bytes), time, *value, *where, state, checkpoint_name(one.step)))
    if not args.json and rows:
        columns = ["step", "size", "saved", *([metric] if metric else []), *(["place"] if places else []), "state"]
        console.table([*columns, "name"], rows)
    elif not rows:
        console.line(f"{args.run}: no checkpoint is saved yet")
    for problem in problems:
        console.warning(problem)
    return 0
