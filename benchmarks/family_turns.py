"""Is Weft's training step slower than transformers' in any family? Two processes in turns, step by step, on a CPU.

    .venv/bin/python benchmarks/family_turns.py [--families llama,mixtral] [--modes eager,compiled] [--rounds 7]

The models and the steps are those of family_step.py, whose measurements take a minute each: on a machine that others
share, its speed differs more between two minutes than two models do. Here each step of Weft has one of transformers
beside it, and the ratio is that of neighbours. Writes a table (.md) and all numbers (.json) into benchmarks/results;
families that are not asked for keep their figures.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
import families  # noqa: E402
from common import available_cores, measured_apart, processor, slug, write_results  # noqa: E402
from family_step import BATCH, JOB, SEQUENCE  # noqa: E402

WARMUP = 2  # steps of each that do not count
PEERS = ("weft", "transformers")


class Worker:
    """A process that makes a step when asked."""

    def __init__(self, job: dict):
        command = [sys.executable, JOB, "--job", json.dumps(job | {"in_turns": True})]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)

    def read(self) -> dict:
        """Returns what the process printed next; its other lines are skipped."""
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the process ended with {self.process.wait()}")

    def step(self) -> dict:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()


def measure(job: dict, rounds: int) -> dict:
    """The steps of both peers, `{peer: [step, ...]}`. Which of them is first alternates."""
    workers = {peer: Worker(job | {"peer": peer}) for peer in PEERS}
    steps = {peer: [] for peer in PEERS}
    try:
        for worker in workers.values():
            worker.read()
        for number in range(WARMUP + rounds):
            for peer in PEERS if number % 2 else reversed(PEERS):
                steps[peer].append(workers[peer].step())
    finally:
        for worker in workers.values():
            worker.process.kill()
    return {peer: found[WARMUP:] for peer, found in steps.items()}


def row(family: str, mode: str, cell: dict) -> str:
    """A line of the table."""
    weft, other = (cell["steps"][peer] for peer in PEERS)
    ratios = sorted(b["seconds"] / a["seconds"] for a, b in zip(weft, other, strict=True))
    seconds = [statistics.median(step["seconds"] for step in steps) for steps in (weft, other)]
    processors = [statistics.median(step["cpu_seconds"] for step in steps) for steps in (weft, other)]
    memory = weft[-1]["peak_bytes"] / other[-1]["peak_bytes"]
    return (
        f"| {families.LABELS[family]} | {mode} | {len(weft)} | {1e3 * seconds[0]:,.0f} | {1e3 * seconds[1]:,.0f} "
        f"| **{statistics.median(ratios):.2f}** | {ratios[0]:.2f} to {ratios[-1]:.2f} "
        f"| {processors[1] / processors[0]:.2f} | {memory:.2f} | {weft[-1]['loss']:.4f}, {other[-1]['loss']:.4f} |"
    )


def save(args: argparse.Namespace, cells: dict) -> None:
    """Writes the table, with the families that were measured before."""
    import torch
    import transformers

    name = f"family_turns-{slug(processor())}-{args.dtype}"
    path = args.out / f"{name}.json"
    found = {"device": processor(), "torch": torch.__version__, "transformers": transformers.__version__}
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = before.get("cells", {}) if all(before.get(key) == value for key, value in found.items()) else {}
    found["cells"] = kept | cells
    order = [(family, mode) for family, mode in product(families.CPU, ("eager", "compiled"))]
    lines = [
        "# Training steps of each family in turns",
        "",
        f"{found['device']}, {args.threads} threads; torch {found['torch']}, transformers {found['transformers']}.",
        "",
        f"{BATCH} sequences of {SEQUENCE['cpu']} tokens, {args.dtype}; models and steps as in family_step.py. Above 1, "
        "Weft is faster: the median ratio of a step of transformers to the step of Weft beside it, its range, and the "
        "ratio of the median CPU times. Below 1, Weft needs less memory (peak of the process).",
        "",
        "| family | mode | steps | Weft (ms) | transformers (ms) | ratio | range | CPU time | memory | last losses |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    names = ((family, mode, found["cells"].get(f"{family} {mode}")) for family, mode in order)
    lines += [row(family, mode, cell) for family, mode, cell in names if cell]
    write_results(args.out, name, "\n".join(lines) + "\n", found, False)


def main() -> int:
    parser = argparse.ArgumentParser(description="Training steps of each family in turns with transformers.")
    parser.add_argument("--families", default=",".join(families.CPU))
    parser.add_argument("--modes", default="eager")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    work = HERE / "work" / f"families-{os.getpid()}"
    base = {"threads": args.threads, "device": "cpu", "dtype": args.dtype, "sequence": SEQUENCE["cpu"], "batch": BATCH}
    try:
        for family, mode in product(args.families.split(","), args.modes.split(",")):
            job = base | {"mode": mode, "folder": str(work / family)}
            if not (work / family).exists():
                made = measured_apart(JOB, job | {"peer": "make", "family": family})
                if "failed" in made:
                    raise SystemExit(f"{family}: no model: {made['failed']}")
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            cell = {"date": now, "steps": measure(job, args.rounds)}
            save(args, {f"{family} {mode}": cell})
            print(row(family, mode, cell), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
