"""What the watch on a run adds to a training step. The goal: under 0.5%.

    .venv/bin/python benchmarks/watch_overhead.py [--sizes tiny,14m] [--pairs 400] [--quick]

One run makes steps with the watch and without it in turns, on the same model: both see the same minute of the machine.
With the watch, the loss and the gradient norm are judged, and times, memory and votes are measured and sent, by the
defaults of the section `watch`. The heartbeat's thread runs beside both. `tiny` has hardly any arithmetic, and so shows
the fixed cost of a step. Writes a table (.md) and all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import available_cores, load_before, measured_apart, processor, slug, write_results  # noqa: E402
from overhead import SEQUENCE, SHAPES  # noqa: E402

ROWS = {"tiny": 4, "14m": 8, "60m": 8}
WARMUP = 110  # steps until the window of the watch is full
GOAL = 0.005


def run_file(size: str, steps: int, threads: int, folder: Path) -> Path:
    config = {
        "run": {"name": size, "directory": str(folder)},
        "model": SHAPES[size],
        "data": {
            "train": {"type": "overhead:Rows", "vocab_size": SHAPES[size]["vocab_size"]},
            "sequence_length": SEQUENCE,
        },
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "training": {
            "steps": steps,
            "batch_tokens": ROWS[size] * SEQUENCE,
            "micro_batch_size": ROWS[size],
            "dtype": "float32",
            "threads": threads,
        },
        "checkpoint": {"every": steps},
        "log": {"every": steps, "trackers": []},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def measure(asked: dict) -> dict:
    """The times of steps with and without the watch, in seconds, in pairs of neighbours."""
    import weft
    from weft.train.loop import Loop
    from weft.train.trainer import Trainer

    nothing = lambda *_: None  # noqa: E731
    ends = []

    class Turns(Loop):
        """A loop that takes the watch off in every second step, and notes when each step ends."""

        def begin(self, step, stop):
            state = super().begin(step, stop)
            own = SimpleNamespace(reduced=nothing, updated=nothing)
            off = SimpleNamespace(votes=lambda _: [], decide=nothing, ended=nothing, own=own, before_save=nothing)
            idle = SimpleNamespace(replay=lambda compute, _: compute(), replayed=None, check_parameters=nothing)
            self.judge, unjudged = self.guard.judge, nothing
            self.kinds = [(self.monitor, self.integrity, self.judge), (off, idle, unjudged)]
            return state

        def after_update(self, step):
            super().after_update(step)
            self.monitor, self.integrity, self.guard.judge = self.kinds[step % 2]
            ends.append((time.perf_counter(), time.thread_time()))

        def leave(self, status, **rest):
            self.monitor, self.integrity, self.guard.judge = self.kinds[0]
            return super().leave(status, **rest)

    class Turned(Trainer):
        loop = Turns

    steps = WARMUP + 2 * asked["pairs"] + 1
    with tempfile.TemporaryDirectory() as folder:
        config = weft.RunConfig.load(run_file(asked["size"], steps, asked["threads"], Path(folder)))
        Turned(config).fit()
    found = {}
    for kind, clock in enumerate(("seconds", "cpu_seconds")):
        # The time from the end of step k to that of step k + 1, at index k - 1, is that of a step of the kind k % 2.
        times = [after[kind] - before[kind] for before, after in itertools.pairwise(ends)]
        pairs = range(WARMUP, WARMUP + 2 * asked["pairs"], 2)
        found[clock] = {"with": [times[k - 1] for k in pairs], "without": [times[k] for k in pairs]}
    return found


def row(size: str, found: dict) -> dict:
    added = {
        clock: statistics.median(a - b for a, b in zip(times["with"], times["without"], strict=True))
        for clock, times in found.items()
    }
    bare = statistics.median(found["seconds"]["without"])
    return {
        "size": size,
        "without_ms": 1e3 * bare,
        "added_us": 1e6 * added["seconds"],
        "added_cpu_us": 1e6 * added["cpu_seconds"],
        "share": added["seconds"] / bare,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="tiny,14m", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--pairs", type=int, default=400, help="pairs of steps")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="does it work at all? No figures to quote")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        print(json.dumps(measure(args.job)), flush=True)
        return 0
    if args.quick:
        args.sizes, args.pairs = "tiny", 30
    found = {}
    for size in args.sizes.split(","):
        asked = {"size": size, "pairs": args.pairs if size == "tiny" else args.pairs // 4, "threads": args.threads}
        found[size] = measured_apart(__file__, asked)
    if failed := [one["failed"] for one in found.values() if "failed" in one]:
        raise SystemExit(failed[0])
    rows = [row(size, one) for size, one in found.items()]
    device = processor()
    lines = [
        "# What the watch adds to a step",
        "",
        f"{device}, {args.threads} threads, {load_before()}, {datetime.date.today()}.",
        "Median of the differences of neighbouring steps with and without the watch, in one run of one process",
        "(`benchmarks/watch_overhead.py`). Goal: under",
        f"{GOAL:.1%} of a step. CPU time is that of the training's thread, which other processes disturb less.",
        "",
        "| model | step without the watch | added | share | added CPU time |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for one in rows:
        name = f"{one['size']}, {ROWS[one['size']] * SEQUENCE:,} tokens a step"
        added = f"{one['added_us']:.0f} us | {one['share']:.2%} | {one['added_cpu_us']:.0f} us"
        lines.append(f"| {name} | {one['without_ms']:.2f} ms | {added} |")
    page = "\n".join(lines) + "\n"
    if args.quick:
        print(page)
    else:
        write_results(args.out, f"watch_overhead-{slug(device)}", page, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
