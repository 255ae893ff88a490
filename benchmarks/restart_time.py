"""Seconds from kill -9 of a rank to the next finished step: `weft train` and `torchrun` with --max-restarts.

    .venv/bin/python benchmarks/restart_time.py [--ranks 2] [--kills 3] [--quick]

Both launchers run the same training, `-m weft train`, and resume from its checkpoints. A rank is killed in the middle
of a step, and the time is split: until the new process exists, imports, process group, data, model, checkpoint, step.
Writes a table (.md) and all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]
from chaos import prepare, write_run  # noqa: E402
from common import load_before, processor, slug, write_results  # noqa: E402

# What each process of a rank loads at its start: it writes the times at which the phases of the start have ended.
CLOCK = """
import importlib.abc, importlib.util, json, os, sys, time

TARGET = "weft.train.trainer"
NAMED = {"start_world": "process group", "prepare": "run directory", "open_run_data": "data", "build": "model",
         "restore": "checkpoint"}

def mark(name):
    with open(os.environ["RESTART_CLOCK"], "a") as file:
        file.write(json.dumps([int(os.environ["RANK"]), os.getpid(), name, time.time()]) + "\\n")

def marked(function, name):
    def call(*arguments, **options):
        result = function(*arguments, **options)
        mark(name)
        return result
    return call

def clock(module):
    mark("imports")
    for name, phase in NAMED.items():
        setattr(module, name, marked(getattr(module, name), phase))
    update = module.Loop.update
    def step(self, *rest):
        result = update(self, *rest)
        mark("step")
        return result
    module.Loop.update = step

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), clock(module))[0]
        return spec

if "RANK" in os.environ and "RESTART_CLOCK" in os.environ:
    mark("python")
    sys.meta_path.insert(0, Finder())
"""
PHASES = ("noticed", "python", "imports", "process group", "run directory", "data", "model", "checkpoint", "first step")
WAYS = {"weft": "`weft train --max-restarts`", "torchrun": "`torchrun --max-restarts`"}
NOTES = """\
- noticed: from kill -9 to the first line of Python in the new process: the death is noticed, the other ranks are ended,
  the launcher waits (torchrun: a rendezvous), and the process starts.
- The other columns are those of the slowest rank. imports: torch and Weft; first step: files of the run directory, the
  first forward and backward, and the update.
- Beside Python: all but noticed and imports. Start-up of Python: `python -c "import torch"`, as many processes at a
  time as there are ranks."""


def command(way: str, file: Path, ranks: int, kills: int) -> list[str]:
    if way == "weft":
        return [sys.executable, "-m", "weft", "train", str(file), "--nproc", str(ranks), "--max-restarts", str(kills)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts"]
    launch += [str(kills), "--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--local-addr", "127.0.0.1"]
    return [*launch, "-m", "weft", "train", str(file)]


def marks(path: Path) -> list[tuple[int, int, str, float]]:
    """Rank, process, phase and time of the complete lines."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def measure(way: str, work: Path, ranks: int, kills: int) -> dict:
    """Kills a rank `kills` times, and returns phase -> seconds of each restart."""
    file, clock = write_run(work, way, "dp", "sync", 100_000), work / f"{way}.clock"
    file.write_text(file.read_text().replace('{"dp_shard": 4}', '{"dp_shard": -1}'))
    (work / "sitecustomize.py").write_text(CLOCK)
    path = os.pathsep.join([str(work), str(HERE.parent / "src")])
    environment = os.environ | {"PYTHONPATH": path, "RESTART_CLOCK": str(clock), "OMP_NUM_THREADS": "1"}
    found = {phase: [] for phase in (*PHASES, "all")}
    with (work / f"{way}.log").open("w") as log:
        launcher = subprocess.Popen(command(way, file, ranks, kills), cwd=work, env=environment, stdout=log, stderr=log)
    try:
        seen: set[int] = set()
        killed = 0.0
        for number in range(kills + 1):
            steps = 40 if number < kills else 1  # beyond a checkpoint, which is saved every 20
            while len([m for m in marks(clock) if m[1] not in seen and m[2] == "step"]) < steps * ranks:
                if launcher.poll() is not None:
                    raise SystemExit(f"{way} ended: {(work / f'{way}.log').read_text()[-3000:]}")
                time.sleep(0.02)
            of_attempt = [mark for mark in marks(clock) if mark[1] not in seen]
            if number:
                add(found, of_attempt, killed)
            seen |= {mark[1] for mark in of_attempt}
            if number < kills:
                victim = next(pid for rank, pid, *_ in of_attempt if rank == ranks - 1)
                killed = time.time()
                os.kill(victim, signal.SIGKILL)
    finally:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(60)
        except subprocess.TimeoutExpired:
            launcher.kill()
    return found


def add(found: dict, of_attempt: list, killed: float) -> None:
    """Adds the phases of a restart: the slowest rank's end of each phase, minus that of the phase before."""
    before = killed
    for phase in PHASES:
        name = {"noticed": "python", "first step": "step"}.get(phase, phase)
        if phase == "python":
            continue
        ends = {}
        for rank, _, what, at in of_attempt:
            if what == name:
                ends.setdefault(rank, at)
        end = max(ends.values())
        found[phase].append(end - before)
        before = end
    found["all"].append(before - killed)


def python_alone(ranks: int) -> float:
    """Seconds of `import torch` in as many processes at a time."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        started = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(ranks)]
        for process in started:
            process.wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def table(found: dict) -> str:
    phases = [phase for phase in PHASES if phase != "python"]
    lines = [
        "# Time from kill -9 to the next step",
        "",
        f"{found['device']}; {found['ranks']} ranks of a tiny model, median of {found['kills']} kills; `import torch` "
        f"alone takes {found['python']:.2f} s; {load_before()}; {found['date'][:10]}.",
        "",
        NOTES,
        "",
        f"| launcher | all | {' | '.join(phases)} | beside Python |",
        "| --- |" + " ---: |" * (len(phases) + 2),
    ]
    for way, got in found["ways"].items():
        seconds = [statistics.median(got[phase]) for phase in phases]
        rest = statistics.median(got["all"]) - statistics.median(got["noticed"]) - statistics.median(got["imports"])
        values = [statistics.median(got["all"]), *seconds, rest]
        lines.append(f"| {WAYS[way]} | {' | '.join(f'{value:.2f} s' for value in values)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="one kill each: does it work? no figures to quote")
    args = parser.parse_args()
    kills = 1 if args.quick else args.kills
    found = {"ways": {}, "ranks": args.ranks, "kills": kills, "device": processor()}
    found |= {"python": python_alone(args.ranks), "date": datetime.datetime.now().isoformat()}
    with tempfile.TemporaryDirectory(prefix="restart-") as folder:
        prepare(Path(folder))
        for way in args.only.split(","):
            found["ways"][way] = got = measure(way, Path(folder), args.ranks, kills)
            print(way, {phase: [round(value, 2) for value in values] for phase, values in got.items()}, flush=True)
    write_results(args.out, f"restart_time-{slug(found['device'])}", table(found), found)


if __name__ == "__main__":
    main()
