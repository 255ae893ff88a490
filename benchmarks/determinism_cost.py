"""What `training.determinism: exact` costs beside `order`: the time of a training step.

    .venv/bin/python benchmarks/determinism_cost.py [--sizes 14m] [--dtypes float32,bfloat16] [--rounds 5] [--quick]

Each measurement is a process of its own, because some settings are read when libraries start. The two levels take
turns. On a GPU, `exact` is to become the default if it costs under 2%. Writes a table (.md) and all numbers (.json)
into benchmarks/results.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import SHAPES, available_cores, load_before, measured_apart, processor, slug, write_results  # noqa: E402

LEVELS = ("order", "exact")
ROWS = {"14m": 8, "60m": 8}
SEQUENCE, WARMUP, VOCABULARY = 256, 3, 32_000


def measure(asked: dict) -> dict:
    """Seconds of each step after the warm-up, and the losses, of `Trainer.step` with random tokens."""
    import torch

    import weft
    from weft.observe.console import Console

    rows = ROWS[asked["size"]]
    config = {
        "model": SHAPES[asked["size"]],
        "data": {"sequence_length": SEQUENCE},
        "optimizer": {"type": "adamw", "lr": 1e-4},
        "schedule": {"type": "constant"},
        "training": {
            "micro_batch_size": rows,
            "dtype": asked["dtype"],
            "threads": asked["threads"],
            "determinism": asked["level"],
        },
        "log": {"every": 1000, "trackers": []},
    }
    tokens = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=torch.Generator().manual_seed(0))
    seconds, losses = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(json.dumps(config | {"run": {"name": "run", "directory": folder}}))
        with weft.Trainer(weft.RunConfig.load(path), batches="global", console=Console(prints=False)) as trainer:
            for _ in range(WARMUP + asked["steps"]):
                began = time.perf_counter()
                losses.append(trainer.step({"tokens": tokens})["loss"])  # a number: the device has computed it
                seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[WARMUP:], "losses": losses}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="14m", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of each measurement")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="does it work at all? No figures to quote")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        print(json.dumps(measure(args.job)), flush=True)
        return 0
    if args.quick:
        args.dtypes, args.rounds, args.steps = "float32", 1, 3
    rows = []
    for size in args.sizes.split(","):
        for dtype in args.dtypes.split(","):
            asked = {"size": size, "dtype": dtype, "steps": args.steps, "threads": args.threads}
            found: dict[str, list[dict]] = {level: [] for level in LEVELS}
            for number in range(args.rounds):
                for level in LEVELS if number % 2 else reversed(LEVELS):
                    found[level].append(measured_apart(__file__, asked | {"level": level}))
                    if "failed" in found[level][-1]:
                        raise SystemExit(f"{size} {dtype} {level}: {found[level][-1]['failed']}")
            medians = {level: statistics.median(s for one in found[level] for s in one["seconds"]) for level in LEVELS}
            runs = [one["losses"] for one in found["exact"]]
            equal = all(losses == runs[0] for losses in runs)
            cost = medians["exact"] / medians["order"] - 1
            rows.append({"size": size, "dtype": dtype, **medians, "cost": cost, "exact_runs_equal": equal})
    device = device_name()
    lines = [
        "# What exact determinism costs",
        "",
        f"{device}, {args.threads} threads, {load_before()}, {datetime.date.today()}."
        f" Median step of {args.rounds} rounds of {args.steps} steps",
        "(`benchmarks/determinism_cost.py`).",
        "",
        "| model | order | exact | cost | losses of exact runs |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        times = " | ".join(f"{1e3 * row[level]:.2f} ms" for level in LEVELS)
        equal = "equal" if row["exact_runs_equal"] else "DIFFERENT"
        name = f"{row['size']}, {ROWS[row['size']] * SEQUENCE:,} tokens a step, {row['dtype']}"
        lines.append(f"| {name} | {times} | {row['cost']:+.1%} | {equal} |")
    page = "\n".join(lines) + "\n"
    if args.quick:
        print(page)
    else:
        write_results(args.out, f"determinism_cost-{slug(device)}", page, rows)
    return 0 if all(row["exact_runs_equal"] for row in rows) else 1


def device_name() -> str:
    """The GPU, or the processor without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


if __name__ == "__main__":
    sys.exit(main())
