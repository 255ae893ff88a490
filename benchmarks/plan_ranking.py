"""Predicted and measured steps of real meshes on this machine: does the planner rank them as they are?

    .venv/bin/python benchmarks/plan_ranking.py [--quick] [--rounds 2]
    .venv/bin/python benchmarks/plan_ranking.py --emulate [--quick]      (needs root, for the slow link)
    .venv/bin/python benchmarks/plan_ranking.py --work FOLDER --minutes 8      (again until all is measured)

Without --emulate: 2 processes with a core each. `weft bench device` and `weft bench comm` measure them, and nothing
else is fitted. With --emulate: 4 processes in a network namespace whose loopback has a token bucket filter; matrix
products take the time of a device with few FLOP/s, by sleeping (`peers/sleeping.py`), because 4 processes on 2 cores
would measure contention. The links are measured behind the same filter.

Prints each mesh, Kendall's tau of predicted and measured step times, that of two rounds of measurements with each
other, which limits the first, and how much slower the plan is that the planner would pick than the best one. Pairs of
meshes whose rounds overlap are ties: tau without them follows. Writes a table (.md) and all numbers (.json) into
benchmarks/results.

With --work, the corpus, the hardware file and all measurements stay in a folder, and a further call continues there;
--minutes ends a call before its next measurement would take too long.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import processor, slug, write_results  # noqa: E402  # pyright: ignore[reportMissingImports]

LENGTH, SEQUENCES = 128, 16
RUN = """
run: {{name: ranking, directory: {folder}/runs}}
model: {{vocab_size: 1024, hidden_size: 256, num_hidden_layers: 8, num_attention_heads: 8, num_key_value_heads: 4,
        intermediate_size: 704}}
tokenizer: {folder}/tok
data: {{train: {folder}/store, sequence_length: {length}}}
objective: {{type: {objective}}}
training: {{steps: 100, batch_tokens: {tokens}, dtype: float32}}
log: {{trackers: []}}
"""
TWO = {
    "dp": ["parallel.dp_replicate=2", "parallel.dp_shard=1"],
    "fsdp": ["parallel.dp_shard=2"],
    "fsdp, recomputation": ["parallel.dp_shard=2", "training.activation_checkpointing=full"],
    "fsdp, micro-batch 1": ["parallel.dp_shard=2", "training.micro_batch_size=1"],
    "cp": ["parallel.cp=2", "parallel.dp_shard=1"],
    "cp, micro-batch 1": ["parallel.cp=2", "parallel.dp_shard=1", "training.micro_batch_size=1"],
    "tp": ["parallel.tp=2", "parallel.dp_shard=1"],
    "tp, micro-batch 1": ["parallel.tp=2", "parallel.dp_shard=1", "training.micro_batch_size=1"],
    "pp, 1f1b, 4 micro-batches": ["parallel.pp=2", "parallel.dp_shard=1", "training.micro_batch_size=4"],
    "pp, 1f1b, 2 micro-batches": ["parallel.pp=2", "parallel.dp_shard=1", "training.micro_batch_size=8"],
}
FOUR = {
    "fsdp": ["parallel.dp_shard=4"],
    "fsdp, micro-batch 1": ["parallel.dp_shard=4", "training.micro_batch_size=1"],
    "dp": ["parallel.dp_replicate=4", "parallel.dp_shard=1"],
    "tp": ["parallel.tp=4", "parallel.dp_shard=1"],
    "tp 2, fsdp 2": ["parallel.tp=2", "parallel.dp_shard=2"],
    "cp 2, fsdp 2": ["parallel.cp=2", "parallel.dp_shard=2"],
    "pp, 4 micro-batches": ["parallel.pp=4", "parallel.dp_shard=1", "training.micro_batch_size=4"],
    "pp, 16 micro-batches": ["parallel.pp=4", "parallel.dp_shard=1", "training.micro_batch_size=1"],
    "pp 2, fsdp 2": ["parallel.pp=2", "parallel.dp_shard=2", "training.micro_batch_size=2"],
}
QUICK = 3  # meshes
EMULATED_FLOPS = 6e9  # of each process; its core has ten times as many
RATE = "1gbit"  # of the slow loopback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK} meshes and one round; writes no results")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each mesh; the fastest counts")
    parser.add_argument("--emulate", action="store_true", help="4 processes, sleeping products and a slow link")
    parser.add_argument("--work", type=Path, help="folder of the measurements, to continue there; default: temporary")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no measurement that would end later")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.emulate and not args.inside:
        sys.exit(subprocess.run(_behind_filter([*sys.argv, "--inside"])).returncode)
    with tempfile.TemporaryDirectory(prefix="plan-ranking-") as name:
        folder = (args.work or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder, args)


def _behind_filter(words: list[str]) -> list[str]:
    """Returns the command that runs this program in a network namespace with a slow loopback."""
    missing = [name for name in ("unshare", "ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        sys.exit(f"--emulate needs root{' and ' + ', '.join(missing) if missing else ''}")
    script = 'ip link set lo up && tc qdisc add dev lo root tbf rate $0 burst 256kb latency 400ms && exec "$@"'
    return ["unshare", "--net", "bash", "-c", script, RATE, sys.executable, *words]


def measure(folder: Path, args: argparse.Namespace) -> None:
    """Measures and predicts each mesh, and reports if each has been measured in all rounds."""
    from weft.config.run import RunConfig
    from weft.launch.try_config import try_config
    from weft.planner.step import predict

    began = time.monotonic()
    ranks, meshes = (4, FOUR) if args.emulate else (2, TWO)
    meshes = dict(list(meshes.items())[:QUICK]) if args.quick else meshes
    rounds = 1 if args.quick else args.rounds
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.emulate:
        os.environ |= {"RANKING_FLOPS": str(EMULATED_FLOPS), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "peers"), os.environ.get("PYTHONPATH", "")])
    run = prepare(folder, "sleeping:Sleeping" if args.emulate else "pretrain")
    configs = {name: RunConfig.load(run, words, ranks=ranks) for name, words in meshes.items()}
    machine = measured_machine(folder / "here.yaml", ranks, args)
    notes = folder / "measured.jsonl"
    measured: dict[str, list[float]] = {name: [] for name in meshes}
    for line in notes.read_text().splitlines() if notes.exists() else []:
        measured[json.loads(line)["mesh"]].append(json.loads(line)["seconds"])
    longest = 0.0
    for number in range(rounds):  # in turns, so that a busy minute does not hit one mesh alone
        for name, config in configs.items():
            before = time.monotonic()
            if len(measured[name]) > number:
                continue
            if (before - began + 1.2 * longest) / 60 > args.minutes:
                print("not finished: call again", flush=True)
                return
            tried = try_config(config, ranks)
            assert tried is not None, "out of memory"
            measured[name].append(tried.seconds)
            with notes.open("a") as file:
                file.write(json.dumps({"mesh": name, "seconds": tried.seconds, "load": os.getloadavg()[0]}) + "\n")
            longest = max(longest, time.monotonic() - before)
            seconds = predict(config, ranks, machine).step_seconds
            print(f"{name}: predicted {seconds:.3f} s, measured {tried.seconds:.3f} s", flush=True)
    rows = []
    for name, config in configs.items():
        predicted = predict(config, ranks, machine)
        times = {"predicted": predicted.step_seconds, "parts": predicted.parts, "measured": measured[name]}
        rows.append({"mesh": name, **times})
    report(rows, machine.model_dump(exclude_none=True), args)


def measured_machine(path: Path, ranks: int, args: argparse.Namespace) -> Any:
    """Returns the hardware of a file, which is measured first if it does not exist."""
    from weft.planner.hardware import load_hardware

    seconds = "6" if args.quick else "20"
    if not path.exists():
        new = path.with_suffix(".new.yaml")
        weft("bench", "device", "--nproc", str(ranks), "--out", str(new), "--dtype", "float32", "--seconds", seconds)
        weft("bench", "comm", "--nproc", str(ranks), "--into", str(new), "--seconds", seconds)
        new.rename(path)
    machine = load_hardware(path)
    if not args.emulate:
        return machine
    device = machine.device.model_dump() | {
        "peak_tflops": {"float32": EMULATED_FLOPS / 1e12},
        "matmul_efficiency": {"float32": 1.0},
        "matmul_half_size": 0.0,
        "attention_efficiency": 0.5,  # the emulation counts the pairs that the mask hides
    }
    overlap = {"slowdown": 0.0}  # a device that sleeps leaves the cores to collectives
    return type(machine).model_validate(machine.model_dump() | {"device": device, "overlap": overlap})


def prepare(folder: Path, objective: str) -> Path:
    """Makes a corpus, a tokenizer, a token store and a run file, whose path it returns, unless they exist."""
    run = folder / "run.yaml"
    if run.exists():
        return run
    chooser = random.Random(0)
    words = ["".join(chooser.choices("abcdefghijklmnop", k=chooser.randint(2, 7))) for _ in range(3000)]
    (folder / "text").mkdir()
    for number in range(40):
        text = " ".join(chooser.choices(words, k=4000))
        (folder / "text" / f"{number}.txt").write_text(text)
    weft("data", "train-tokenizer", str(folder / "text"), "--vocab-size", "1024", "--out", str(folder / "tok"))
    weft("data", "pack", str(folder / "text"), "--tokenizer", str(folder / "tok"), "--out", str(folder / "store"))
    run.write_text(RUN.format(folder=folder, length=LENGTH, tokens=LENGTH * SEQUENCES, objective=objective))
    return run


def weft(*words: str) -> None:
    """Runs a command of Weft."""
    subprocess.run([sys.executable, "-m", "weft", *words], check=True, stdout=subprocess.DEVNULL)


def kendall(one: Sequence[float], other: Sequence[float], ties: Container[tuple[int, int]] = ()) -> float:
    """Returns Kendall's tau of two orders: pairs in the same order less pairs in the other, of all pairs but ties."""
    pairs = [pair for pair in combinations(range(len(one)), 2) if pair not in ties]
    signs = [(one[a] - one[b]) * (other[a] - other[b]) for a, b in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def overlapping(rows: list[dict]) -> set[tuple[int, int]]:
    """Returns the pairs of rows whose rounds of measurements overlap."""
    spans = [(min(row["measured"]), max(row["measured"])) for row in rows]
    pairs = combinations(range(len(rows)), 2)
    return {(a, b) for a, b in pairs if spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]}


def best(row: dict) -> float:
    return min(row["measured"])


def report(rows: list[dict], machine: dict, args: argparse.Namespace) -> None:
    """Prints the table, and writes it unless only a few meshes were measured."""
    picked, fastest = min(rows, key=lambda row: row["predicted"]), min(map(best, rows))
    lines = ["| mesh | predicted, s | measured, s | error | predicted parts, s |", "| --- | ---: | ---: | ---: | --- |"]
    for row in sorted(rows, key=best):
        error, times = row["predicted"] / best(row) - 1, ", ".join(f"{one:.3f}" for one in row["measured"])
        parts = ", ".join(f"{name} {one:.3f}" for name, one in row["parts"].items() if one >= 5e-4)
        lines.append(f"| {row['mesh']} | {row['predicted']:.3f} | {times} | {error:+.0%} | {parts} |")
    what = "4 processes, emulated devices and links" if args.emulate else "2 processes"
    page = f"# Predicted and measured steps of meshes: {what}\n\n{processor()}\n\n" + "\n".join(lines)
    predicted, ties = [row["predicted"] for row in rows], overlapping(rows)
    tau = kendall(predicted, [best(row) for row in rows])
    page += f"\n\nKendall's tau {tau:.2f} of predicted and measured times (the fastest of each row); the picked plan "
    page += f"({picked['mesh']}) is {best(picked) / fastest - 1:.1%} slower than the best.\n"
    rounds = list(zip(*(row["measured"] for row in rows), strict=True))
    if len(rounds) > 1:
        noise = median(max(row["measured"]) / best(row) - 1 for row in rows)
        page += f"Two rounds of measurements have a tau of {kendall(rounds[0], rounds[1]):.2f} with each other, and "
        page += f"differ by {noise:.0%} in the median.\n"
        page += f"The rounds of {len(ties)} of {len(rows) * (len(rows) - 1) // 2} pairs of meshes overlap; tau of the "
        page += f"other pairs is {kendall(predicted, [best(row) for row in rows], ties):.2f}.\n"
    if args.quick:
        print(page)
        return
    name = f"plan_ranking-{slug(processor())}" + "-emulated" * args.emulate
    write_results(args.out, name, page, {"meshes": rows, "hardware": machine})


if __name__ == "__main__":
    main()
