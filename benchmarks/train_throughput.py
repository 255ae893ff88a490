"""Training tokens/s of the same shape, batch and precision in Weft and its peers.

The peers: Hugging Face `Trainer`, a bare PyTorch loop over Hugging Face's Llama, one over litgpt's GPT, and one over
nanoGPT's (`--nanogpt FOLDER`: a clone of its repository).

    .venv/bin/python benchmarks/train_throughput.py [--sizes 14m,60m] [--rounds 3] [--minutes 25] [--quick]

Every measurement is a process of its own, with the same threads, data and number of steps. The peers take turns
(A B C D, A B C D, ...), so that a slow minute of the machine hits all of them; the table has each one's median step
over all rounds. Writes a table (.md) and all numbers (.json) into benchmarks/results. See benchmarks/README.md.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import (  # noqa: E402
    SHAPES,
    VOCABULARY,
    available_cores,
    flops_per_token,
    processor,
    slug,
    write_results,
    write_tokens,
)

SEQUENCE = 256
# (sequences a step; warm-up and measured steps in bf16, in fp32): a whole round in some ten minutes on 4 cores.
PLAN = {"14m": (16, (2, 8), (2, 4)), "60m": (8, (2, 4), (1, 3))}
DTYPES = ("bf16", "fp32")
MODES = ("eager", "compiled")
PEERS = {  # name in the table, program, which environment runs it
    "weft": ("Weft", "weft_trainer.py", "own"),
    "trainer": ("Hugging Face Trainer", "hf_trainer.py", "own"),
    "hf": ("bare loop, Hugging Face's Llama", "hf_loop.py", "own"),
    "litgpt": ("bare loop, litgpt's GPT", "litgpt_loop.py", "litgpt"),
    "nanogpt": ("bare loop, nanoGPT's GPT", "nanogpt_loop.py", "own"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training tokens/s of Weft and its peers.")
    parser.add_argument("--sizes", default="14m,60m", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--only", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=25, help="start no measurement after this many minutes")
    parser.add_argument("--steps", type=int, help="measured steps, in place of each size's own number")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="one round of 14m with two steps: does it work at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--litgpt-python", type=Path, default=HERE.parent / ".venv-litgpt/bin/python")
    parser.add_argument("--add", action="store_true", help="add the rounds to those that the table has")
    parser.add_argument("--nanogpt", type=Path, help="a clone of nanoGPT's repository")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds, args.steps = "14m", 1, args.steps or 2
    for name, known in (
        ("sizes", SHAPES),
        ("dtypes", DTYPES),
        ("modes", MODES),
        ("only", PEERS),
    ):
        values = getattr(args, name).split(",")
        if unknown := set(values) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
        setattr(args, name, values)
    return args


def run(program: str, asked: dict, python: str, args: argparse.Namespace) -> dict | str:
    """The program's last line as JSON; or, in a word, why there is none."""
    source = str(HERE.parent / "src")
    environment = os.environ | {
        "OMP_NUM_THREADS": str(args.threads),
        "PYTHONPATH": os.pathsep.join([str(HERE / "peers"), source, os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            [python, str(HERE / "peers" / program), json.dumps(asked)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            cwd=asked["work"],
        )
    except subprocess.TimeoutExpired:
        return "took more than 10 minutes"
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        return f"exit code {done.returncode}: {lines[-1][:200]}"
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace) -> dict:
    """Round after round until the rounds or the minutes are used up."""
    work = HERE / "work"
    work.mkdir(exist_ok=True)
    began = time.monotonic()
    base = {
        "data": str(write_tokens(work / "tokens.npy", 512, SEQUENCE)),
        "work": str(work),
        "threads": args.threads,
        "device": args.device,
    }
    base |= {"sequence": SEQUENCE}

    peaks = dict.fromkeys(args.dtypes, 0.0)
    cells, failed, whole_rounds = {}, {}, 0
    if args.add and (path := args.out / f"{name_of(args)}.json").exists():
        before = json.loads(path.read_text())
        if before["versions"] != versions() or before["threads"] != args.threads:
            sys.exit(f"{path} has other versions or threads; leave out --add to replace it")
        peaks |= before["matmul_peak_flops_per_second"]
        cells, whole_rounds = before["cells"], before["whole_rounds"]
    for number in range(whole_rounds, whole_rounds + args.rounds):
        for dtype in args.dtypes:
            # Once a round, and the best of all: one look at a busy moment would make everybody's share look too good.
            asked = base | {"dtype": dtype, "seconds": 0.5 if args.quick else 1.5}
            peak = run("matmul_peak.py", asked, sys.executable, args)
            if isinstance(peak, str):
                sys.exit(f"the matmul peak in {dtype}: {peak}")
            peaks[dtype] = max(peaks[dtype], peak["flops_per_second"])
            print(f"round {number + 1}: matmul peak in {dtype}: {peaks[dtype] / 1e9:,.0f} GFLOP/s", flush=True)
        for size, dtype, mode, peer in product(args.sizes, args.dtypes, args.modes, args.only):
            key = f"{size} {dtype} {mode} {peer}"
            if key in failed:
                continue
            if time.monotonic() - began > 60 * args.minutes:
                print(f"{args.minutes:g} minutes are over: stopping in round {number + 1}", flush=True)
                return result(args, cells, failed, peaks, whole_rounds)
            _, program, environment = PEERS[peer]
            python = sys.executable if environment == "own" else str(args.litgpt_python)
            if not Path(python).exists():
                failed[key] = "its environment is not there (make bench makes it)"
                continue
            if peer == "nanogpt" and not args.nanogpt:
                failed[key] = "it needs a clone of nanoGPT (--nanogpt FOLDER)"
                continue
            rows, *steps = PLAN[size]
            warmup, measured = steps[dtype == "fp32"]
            asked = base | {"size": size, "dtype": dtype, "compile": mode == "compiled", "batch": rows}
            asked |= {"warmup": warmup, "steps": args.steps or measured}
            asked["nanogpt"] = args.nanogpt and str(args.nanogpt.resolve())
            try:
                got = run(program, asked, python, args)
            except KeyboardInterrupt:
                print("interrupted: the table has what there is", flush=True)
                return result(args, cells, failed, peaks, whole_rounds)
            if isinstance(got, str):
                failed[key] = got
                print(f"round {number + 1}: {key}: FAILED: {got}", flush=True)
                continue
            cells.setdefault(key, []).append(got)
            speed = rows * SEQUENCE / statistics.median(got["seconds"])
            print(f"round {number + 1}: {key}: {speed:,.0f} tokens/s", flush=True)
            save(args, result(args, cells, failed, peaks, whole_rounds), show=False)
        whole_rounds += 1
    return result(args, cells, failed, peaks, whole_rounds)


def versions() -> dict[str, str]:
    """Of Python and of everybody who is measured."""
    import torch

    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    for package in ("weft", "transformers"):
        try:
            found[package] = __import__(package).__version__
        except ImportError:
            found[package] = "absent"
    pins = (HERE / "peers" / "litgpt-constraints.txt").read_text()
    found["litgpt"] = re.search(r"^litgpt==(.+)$", pins, re.M).group(1)
    return found


def device_of(args: argparse.Namespace) -> str:
    import torch

    return torch.cuda.get_device_name() if args.device == "cuda" else processor()


def name_of(args: argparse.Namespace) -> str:
    """The name of the table's files: of a part of the sizes and dtypes, they name the part."""
    part = [*args.sizes, *args.dtypes] if (args.sizes, args.dtypes) != (list(SHAPES), list(DTYPES)) else []
    return "-".join(["train_throughput", slug(device_of(args)), *part, *(["quick"] if args.quick else [])])


def result(args, cells: dict, failed: dict, peaks: dict, whole_rounds: int) -> dict:
    """All that was measured, and on what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_of(args),
        "threads": args.threads,
        "versions": versions(),
        "sequence": SEQUENCE,
        "sequences_a_step": {size: PLAN[size][0] for size in args.sizes},
        "whole_rounds": whole_rounds,
        "quick": args.quick,
        "matmul_peak_flops_per_second": peaks,
        "cells": cells,
        "failed": failed,
    }


def table(args: argparse.Namespace, found: dict) -> str:
    """The result as a page of Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# Training throughput",
        "",
        f"{found['device']}, {found['threads']} threads; {versions}; {found['date'][:10]}.",
        "",
        f"Sequences of {SEQUENCE} tokens, vocabulary {VOCABULARY:,}, AdamW (fused), clipping; bf16 is compute over "
        f"float32 state. Median step over {found['whole_rounds']} whole rounds and what there was of "
        "the next, taking turns, each in a fresh process.",
    ]
    if found["quick"]:
        lines += ["", "**A quick look, not a measurement**: one round of two steps."]
    for size, dtype in product(args.sizes, args.dtypes):
        rows = found["sequences_a_step"][size]
        flops = flops_per_token(SHAPES[size], SEQUENCE)
        peak = found["matmul_peak_flops_per_second"][dtype]
        speeds, memory = {}, {}
        for mode, peer in product(MODES, PEERS):  # also what --add found, and this call does not measure
            runs = found["cells"].get(f"{size} {dtype} {mode} {peer}")
            if runs:
                speeds[peer, mode] = rows * SEQUENCE / statistics.median(s for r in runs for s in r["seconds"])
                memory[peer, mode] = statistics.median(r["peak_bytes"] for r in runs)
        if not speeds:
            continue
        parameters = next(iter(runs for k, runs in found["cells"].items() if k.startswith(f"{size} ")))[0]["parameters"]
        lines += [
            "",
            f"## {parameters / 1e6:.1f}M parameters, {dtype}",
            "",
            f"{rows} sequences a step; the machine's matmul peak: {peak / 1e9:,.0f} GFLOP/s.",
            "",
            "| | tokens/s | of the matmul peak | x Trainer | Weft is x faster | memory (MiB) |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for (peer, mode), speed in sorted(speeds.items(), key=lambda item: -item[1]):
            # Like is compared with like: eager with eager, compiled with compiled.
            trainer, weft = speeds.get(("trainer", mode)), speeds.get(("weft", mode))
            lines.append(
                f"| {PEERS[peer][0]}, {mode} | {speed:,.0f} | {speed * flops / peak:.0%} "
                f"| {f'{speed / trainer:.2f}' if trainer else '-'} | {f'{weft / speed:.2f}' if weft else '-'} "
                f"| {memory[peer, mode] / 2**20:,.0f} |"
            )
        best = {peer: max((s for (p, _), s in speeds.items() if p == peer), default=None) for peer in PEERS}
        if best.get("weft"):
            others = [f"{best['weft'] / s:.2f} x {PEERS[p][0]}" for p, s in best.items() if s and p != "weft"]
            if others:
                lines += ["", f"Weft's best against each one's best: {', '.join(others)}."]
    if found["failed"]:
        lines += ["", "Not measured:", ""] + [f"- {key}: {why}" for key, why in found["failed"].items()]
    return "\n".join(lines) + "\n"


def save(args: argparse.Namespace, found: dict, show: bool = True) -> None:
    """Writes what was measured so far."""
    write_results(args.out, name_of(args), table(args, found), found, show)


def main() -> int:
    args = arguments()
    found = measure(args)
    save(args, found)
    return 0 if found["cells"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
