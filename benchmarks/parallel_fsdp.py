"""A training step of the same Llama on some processes: Weft's meshes beside the peers' FSDP2, DDP and tensor parallel.

    .venv/bin/python benchmarks/parallel_fsdp.py [--ranks 2] [--sizes 60m] [--rounds 3] [--minutes 40]

The processes are on this machine, speak by gloo and share its cores. All begin with the same weights and take the same
rows of the same tokens, so the first losses are to agree. They take turns, round after round; the table has each one's
median step over all rounds. Writes a table (.md) and all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import itertools
import os
import shutil
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import (  # noqa: E402
    SHAPES,
    available_cores,
    flops_per_token,
    measured_apart,
    measured_on_ranks,
    parameters_of,
    processor,
    slug,
    write_results,
    write_tokens,
)

JOB = str(HERE / "peers" / "parallel_steps.py")
RANKS = next((int(b) for a, b in itertools.pairwise(sys.argv) if a == "--ranks"), 4)
SEQUENCE, ROWS = 256, 16  # of a step, over all ranks
WARMUP, STEPS = 2, {"bf16": 5, "fp32": 3}
DATA = {  # name in the table, what parallel_steps.py is asked for; the first is what the others are compared with
    "weft": (f"Weft, `dp_shard: {RANKS}` (FSDP2)", {"peer": "weft", "mesh": {"dp_shard": RANKS}}),
    "weft-narrow": (
        f"Weft, `dp_shard: {RANKS}`, `reduce_dtype: bfloat16`",
        {"peer": "weft", "mesh": {"dp_shard": RANKS}, "reduce": "bfloat16"},
    ),
    "weft-hf": (
        f"Weft, `dp_shard: {RANKS}`, transformers' model (`type: hf`)",
        {"peer": "weft", "mesh": {"dp_shard": RANKS}, "hf": True},
    ),
    "accelerate-fsdp2": ("Accelerate, FSDP2", {"peer": "accelerate", "mesh": "fsdp2"}),
    "transformers-fsdp2": (
        f"transformers, `DistributedConfig(fsdp_size={RANKS})`",
        {"peer": "transformers", "mesh": {"fsdp_size": RANKS}},
    ),
    "weft-replicate": (
        f"Weft, `dp_replicate: {RANKS}`",
        {"peer": "weft", "mesh": {"dp_replicate": RANKS, "dp_shard": 1}},
    ),
    "accelerate-ddp": ("Accelerate, DDP", {"peer": "accelerate", "mesh": "ddp"}),
    "ddp": ("PyTorch, `DistributedDataParallel`", {"peer": "ddp"}),
}
OTHERS = {
    "weft-tp": (f"Weft, `tp: {RANKS}`", {"peer": "weft", "mesh": {"tp": RANKS}}),
    "transformers-tp": (
        f"transformers, `DistributedConfig(tp_size={RANKS})`",
        {"peer": "transformers", "mesh": {"tp_size": RANKS}},
    ),
    "weft-cp": (f"Weft, `cp: {RANKS}`", {"peer": "weft", "mesh": {"cp": RANKS}}),
    "weft-pp": (f"Weft, `pp: {RANKS}`, 8 micro-batches", {"peer": "weft", "mesh": {"pp": RANKS}, "micro": ROWS // 8}),
}
SUBJECTS = DATA | OTHERS
NARROW = {"weft-narrow"}  # says something in bf16 alone
NOTES = """\
- **Weft**: the parts of its training loop: `build_sharded_model`, passes, clipping, the same AdamW; the loss's weight
  and the loss are summed over the ranks in each step. Gradients are summed in float32 unless it says bfloat16.
- **Accelerate**: `Accelerator` with `prepare`, `backward` and `clip_grad_norm_`; FSDP2 with `fsdp_version=2`, a unit
  for each layer, and its defaults (`mixed_precision="bf16"` sums gradients in bfloat16 too). On CPUs Accelerate takes
  no notice of its FSDP plugin and goes on with DDP; here it is told by hand that it is FSDP, and the rest is its own.
- **transformers**: a model that is sharded by its own `DistributedConfig`, in a plain loop; FSDP2 by its
  `fsdp_mixed_precision` (gradients summed in float32), tensor parallel, which has no sequence parallel, under autocast.
- **PyTorch**: `DistributedDataParallel` in a plain loop, under autocast.
- The peers' model is transformers' Llama with its own loss. `type: hf` is that model in Weft's hands: beside the peers'
  FSDP2 it says what the sharding is worth, and beside Weft's own what the model is.
- All processes have the threads' and the allocator's settings of `weft train`, so that what differs is the model and
  how it is shared. A step lasts from the end of one to the end of the next. CPU seconds are those of all processes in
  a step, also for communicating: beside other programs they vary less than the time. Memory is the peak of the largest
  of the processes, with its libraries and loading."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A step on four processes, of Weft and its peers.")
    parser.add_argument("--ranks", type=int, default=RANKS, help="number of processes")
    parser.add_argument("--sizes", default="60m", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--modes", default="eager", help="of eager, compiled (a minute more for each measurement)")
    parser.add_argument("--only", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=40, help="start no measurement after this many minutes")
    parser.add_argument("--threads", type=int, default=max(1, available_cores() // RANKS), help="of each process")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one round of two steps: does it work at all?"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.quick:
        SHAPES["tiny"] = SHAPES["60m"] | {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
        SHAPES["tiny"] |= {"num_key_value_heads": 4, "intermediate_size": 172, "vocab_size": 512}
        args.sizes, args.rounds = "tiny", 1
    known = {"sizes": SHAPES, "dtypes": STEPS, "modes": ("eager", "compiled"), "only": SUBJECTS}
    for name, values in known.items():
        asked = getattr(args, name).split(",")
        if unknown := set(asked) - set(values):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(values)}")
        setattr(args, name, asked)
    return args


def measure(args: argparse.Namespace, work: Path) -> tuple[dict, dict, int]:
    """Round after round until the rounds or the minutes are used up: what was measured, what failed, whole rounds."""
    began, cells, failed = time.monotonic(), {}, {}
    base = {"threads": args.threads, "device": "cpu", "batch": ROWS, "sequence": SEQUENCE}
    jobs = {}
    for size in args.sizes:
        shape, folder = SHAPES[size], work / size
        data = write_tokens(work / f"{size}.npy", 512, SEQUENCE, shape["vocab_size"])
        jobs[size] = base | {"shape": shape, "folder": str(folder), "data": str(data)}
        made = measured_apart(JOB, jobs[size] | {"peer": "make"})
        if "failed" in made:
            sys.exit(f"{size}: {made['failed']}")
    for number in range(args.rounds):
        for size, dtype, mode, subject in itertools.product(args.sizes, args.dtypes, args.modes, args.only):
            key = f"{size} {dtype} {mode} {subject}"
            if key in failed or (dtype != "bf16" and subject in NARROW):
                continue
            if time.monotonic() - began > 60 * args.minutes:
                print(f"{args.minutes:g} minutes are over: stopping in round {number + 1} of {args.rounds}")
                return cells, failed, number
            steps = {"warmup": 1, "steps": 2} if args.quick else {"warmup": WARMUP, "steps": STEPS[dtype]}
            job = jobs[size] | steps | {"dtype": dtype, "compile": mode == "compiled"} | SUBJECTS[subject][1]
            try:
                got = measured_on_ranks(JOB, job, RANKS)
            except KeyboardInterrupt:
                print("interrupted: the table has what there is")
                return cells, failed, number
            if "failed" in got:
                failed[key] = got["failed"][:200]
                print(f"round {number + 1}: {key}: FAILED: {failed[key]}", flush=True)
                continue
            cells.setdefault(key, []).append(got)
            print(f"round {number + 1}: {key}: {1e3 * statistics.median(got['seconds']):,.0f} ms", flush=True)
    return cells, failed, args.rounds


def result(args: argparse.Namespace, measured: tuple[dict, dict, int]) -> dict:
    """All that was measured, and on what."""
    versions = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "accelerate"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    cells, failed, rounds = measured
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": processor(),
        "processes": RANKS,
        "threads": args.threads,
        "versions": versions,
        "sequence": SEQUENCE,
        "sequences_a_step": ROWS,
        "whole_rounds": rounds,
        "quick": args.quick,
        "cells": cells,
        "failed": failed,
    }


def table(args: argparse.Namespace, found: dict) -> str:
    """The result as a page of Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        f"# A training step on {RANKS} processes",
        "",
        f"{found['device']}; {RANKS} processes of {found['threads']} thread{'s' * (found['threads'] > 1)}, gloo; "
        f"{versions}; {found['date'][:10]}.",
        "",
        f"{ROWS} sequences of {SEQUENCE} tokens a step, over all processes; median step over {found['whole_rounds']} "
        "whole rounds and what there was of the next, taking turns, each in fresh processes.",
        "",
        NOTES,
    ]
    if found["quick"]:
        lines += ["", "**A quick look at a tiny model, not a measurement.**"]
    for size, dtype, mode in itertools.product(args.sizes, args.dtypes, args.modes):
        steps, peaks, first, cpu = {}, {}, {}, {}
        for subject in SUBJECTS:
            if runs := found["cells"].get(f"{size} {dtype} {mode} {subject}"):
                steps[subject] = statistics.median(s for run in runs for s in run["seconds"])
                peaks[subject] = statistics.median(run["peak_bytes"] for run in runs)
                first[subject] = runs[0]["first_loss"]
                cpu[subject] = statistics.median(run["cpu_seconds"] for run in runs)
        if not steps:
            continue
        shape = SHAPES[size]
        lines += ["", f"## {parameters_of(shape) / 1e6:.1f}M parameters, {dtype}, {mode}"]
        for title, subjects in (("rows shared out", DATA), ("other ways to share a step, for the record", OTHERS)):
            if not any(subject in steps for subject in subjects):
                continue
            own, tokens = steps.get("weft"), ROWS * SEQUENCE
            lines += [
                "",
                f"| {title} | step (ms) | tokens/s | GFLOP/s | Weft's FSDP2 is x faster | CPU (s) "
                "| memory (MiB) | first loss |",
                "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            ]
            for subject in sorted((s for s in subjects if s in steps), key=steps.get):
                seconds = steps[subject]
                flops = tokens * flops_per_token(shape, SEQUENCE) / seconds
                lines.append(
                    f"| {SUBJECTS[subject][0]} | {1e3 * seconds:,.0f} | {tokens / seconds:,.0f} | {flops / 1e9:,.0f} "
                    f"| {f'{seconds / own:.2f}' if own else '-'} | {cpu[subject]:.2f} | {peaks[subject] / 2**20:,.0f} "
                    f"| {first[subject]:.4f} |"
                )
    if found["failed"]:
        lines += ["", "Not measured:", ""] + [f"- {key}: {why}" for key, why in found["failed"].items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    args = arguments()
    own = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(own))
    work = HERE / "work" / f"ranks-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        found = result(args, measure(args, work))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not found["cells"]:
        print("\n".join(f"{key}: {why}" for key, why in found["failed"].items()))
        return 1
    name = (
        f"parallel_fsdp-{slug(found['device'])}"
        + (f"-{RANKS}-processes" if RANKS != 4 else "")
        + ("-quick" if args.quick else "")
    )
    write_results(args.out, name, table(args, found), found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
