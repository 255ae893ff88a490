"""Fifty deaths in one run: is the loss curve that of a run without deaths, bit for bit, and what did they cost?

    .venv/bin/python benchmarks/chaos.py [--deaths 50] [--meshes dp,tp,pp] [--modes sync,async,local] [--quick]

A run of 4 processes trains once undisturbed and once under kill -9 at random instants: of one rank, of all ranks, or of
the launcher with its whole process tree's parent. `weft train --max-restarts` restarts dead ranks by itself; after the
death of the launcher, this program gives the same command again, as a service manager would. Half of the deaths strike
while a session starts, half within seconds of its first step. Then the losses and gradient norms of all steps, each
time that a step was made, and all tensors of the last checkpoint are compared with those of the undisturbed run.
"""

import argparse
import datetime
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import load_before, processor, slug, write_results  # noqa: E402

RANKS = 4
MESHES = {
    "dp": {"dp_shard": 4},
    "tp": {"dp_shard": 2, "tp": 2},
    "pp": {"pp": 2, "dp_shard": 2},
}
KINDS = {"rank": 6, "all ranks": 2, "launcher": 2}  # relative frequencies
COMPARED = ("loss", "grad_norm", "lr", "tokens", "validation_loss")
MODES = {"sync": {}, "async": {"mode": "async"}, "local": {"mode": "async", "local": {"steps": 3}}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deaths", type=int, default=50, help="deaths of each run")
    parser.add_argument("--meshes", default="dp,tp,pp", help=f"of {', '.join(MESHES)}")
    parser.add_argument("--modes", default="sync", help=f"of checkpoints, of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=40, help="limit of each run")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="5 deaths on one mesh: does it work at all?")
    args = parser.parse_args()
    if args.quick:
        args.deaths, args.meshes, args.steps = 5, "dp", 120
    return args


def weft(*command: str) -> list[str]:
    return [sys.executable, "-m", "weft", *command]


def prepare(work: Path) -> None:
    """Makes a corpus, a tokenizer and a token store."""
    chooser = random.Random(0)
    words = ["".join(chooser.choices("abcdefghijklmnop", k=chooser.randint(2, 9))) for _ in range(400)]
    (work / "text").mkdir()
    for number in range(60):
        text = " ".join(chooser.choices(words, k=600))
        (work / "text" / f"{number}.txt").write_text(text)
    for command in (
        ("data", "train-tokenizer", "text", "--vocab-size", "512", "--out", "tok"),
        ("data", "pack", "text", "--tokenizer", "tok", "--out", "store"),
    ):
        subprocess.run(weft(*command), cwd=work, check=True, capture_output=True)


def write_run(work: Path, name: str, mesh: str, mode: str, steps: int) -> Path:
    run = {
        "run": {"name": name, "directory": "runs", "seed": 7},
        "model": {"preset": "llama-tiny", "vocab_size": 512, "num_hidden_layers": 2},
        "tokenizer": "tok",
        "data": {"train": "store", "sequence_length": 64},
        "objective": {"type": "pretrain"},
        "optimizer": {"type": "adamw", "lr": 3e-3},
        "schedule": {"type": "cosine", "warmup_steps": 20},
        "training": {"steps": steps, "batch_tokens": 1024, "micro_batch_size": 4, "dtype": "float32", "threads": 1},
        "parallel": MESHES[mesh],
        "checkpoint": {"every": 20, "keep_last": 2} | MODES[mode],
        "log": {"every": 1},
    }
    path = work / f"{name}.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in run.items()))
    return path


def metrics(run: Path) -> list[dict]:
    """The complete lines of metrics.jsonl; [] before the first."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@dataclass
class Storm:
    """A run under kill -9.

    Attributes:
        deaths: kind -> number.
        recovery: seconds from each death of ranks to the next step's line.
        commands: number of times that the command was given.
    """

    work: Path
    command: list[str]
    run: Path
    chooser: random.Random
    minutes: float
    deaths: Counter = field(default_factory=Counter)
    recovery: list[float] = field(default_factory=list)
    commands: int = 0
    made: dict[int, set[str]] = field(default_factory=dict)
    seen: int = 0

    def start(self) -> None:
        self.commands += 1
        with (self.work / "storm.log").open("a") as log:
            self.launcher = subprocess.Popen(self.command, cwd=self.work, stdout=log, stderr=log)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, by number."""
        found = []
        try:
            for child in psutil.Process(self.launcher.pid).children(recursive=True):
                try:
                    if "RANK" in (environ := child.environ()) and "weft" in " ".join(child.cmdline()):
                        found.append((int(environ["RANK"]), child))
                except psutil.Error:
                    continue
        except psutil.Error:
            return []
        return [child for _, child in sorted(found, key=lambda pair: pair[0])]

    def newest(self) -> float:
        """The time at which the newest line of metrics was written; 0 before the first. Collects all lines."""
        path = self.run / "metrics.jsonl"
        for line in metrics(self.run):
            self.made.setdefault(line["step"], set()).add(json.dumps([line.get(key) for key in COMPARED]))
        return path.stat().st_mtime if path.exists() else 0.0

    def wait(self, until, most: float) -> bool:
        """Waits until `until()` is true, the launcher has ended, or `most` seconds have passed; False if it ended."""
        end = time.monotonic() + most
        while time.monotonic() < end:
            self.newest()
            if self.launcher.poll() is not None:
                return False
            if until():
                return True
            time.sleep(0.05)
        raise SystemExit(f"nothing happened for {most:.0f} s; see {self.work}/storm.log")

    def kill(self) -> None:
        kind = self.chooser.choices(list(KINDS), list(KINDS.values()))[0]
        ranks = self.ranks()
        if kind != "launcher" and not ranks:
            kind = "launcher"
        if kind == "launcher":
            self.launcher.kill()
            self.launcher.wait()
            deadline = time.monotonic() + 20
            while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks if p.is_running()):
                if time.monotonic() > deadline:
                    raise SystemExit(f"ranks outlived their launcher: {ranks}")
                time.sleep(0.02)
        else:
            for process in ranks if kind == "all ranks" else [self.chooser.choice(ranks)]:
                try:
                    process.kill()
                except psutil.Error:
                    continue
        self.deaths[kind] += 1

    def rage(self, deaths: int) -> int:
        """Kills `deaths` times, then waits for the end. Returns the exit code of the last command."""
        begin = time.monotonic()
        self.start()
        while sum(self.deaths.values()) < deaths:
            before = self.newest()
            if self.chooser.random() < 0.5:  # while it starts, or just after
                instant = time.monotonic() + self.chooser.uniform(0, 12)
                alive = self.wait(lambda instant=instant: time.monotonic() > instant, 60)
            else:
                killed = time.time()
                alive = self.wait(lambda before=before: self.newest() > before, 180)
                if alive and self.deaths:
                    self.recovery.append(time.time() - killed)
                instant = time.monotonic() + self.chooser.uniform(0, 3)
                alive = alive and self.wait(lambda instant=instant: time.monotonic() > instant, 60)
            if not alive:
                return self.launcher.returncode
            self.kill()
            if self.launcher.poll() is not None:
                self.start()
            if time.monotonic() - begin > self.minutes * 60:
                break
        self.wait(lambda: False, 60 * self.minutes)
        return self.launcher.returncode


def tensors(run: Path) -> dict[str, str]:
    """File name -> SHA-256 of the tensors of the last checkpoint."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    found = json.loads((last / "checksums.json").read_text())
    files = found.get("files", found)
    return {f"{last.name}/{name}": json.dumps(d) for name, d in files.items() if name.endswith(".safetensors")}


def measure(work: Path, mesh: str, mode: str, args: argparse.Namespace) -> dict:
    calm_name, storm_name = f"calm-{mesh}-{mode}", f"storm-{mesh}-{mode}"
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    os.environ |= environment
    begin = time.monotonic()
    calm = write_run(work, calm_name, mesh, "sync", args.steps)
    done = subprocess.run(weft("train", calm.name, "--nproc", str(RANKS)), cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    calm_seconds = time.monotonic() - begin
    expected = {
        line["step"]: json.dumps([line.get(key) for key in COMPARED]) for line in metrics(work / "runs" / calm_name)
    }
    file = write_run(work, storm_name, mesh, mode, args.steps)
    command = weft("train", file.name, "--nproc", str(RANKS), "--max-restarts", "1000")
    storm = Storm(work, command, work / "runs" / storm_name, random.Random(args.seed), args.minutes)
    begin = time.monotonic()
    try:
        code = storm.rage(args.deaths)
    finally:
        if storm.launcher.poll() is None:
            storm.launcher.send_signal(signal.SIGKILL)
    seconds = time.monotonic() - begin
    time.sleep(1)
    alive = [p.pid for p in psutil.process_iter(["cmdline"]) if file.name in (p.info["cmdline"] or [])]
    hidden = [p.name for p in (storm.run / "checkpoints").iterdir() if not p.name.startswith("step-")]
    different = sorted(step for step, lines in storm.made.items() if lines != {expected.get(step)})
    failures = storm.run / "logs" / "failures.jsonl"
    records = [json.loads(line) for line in failures.read_text().splitlines()] if failures.exists() else []
    return {
        "mesh": mesh,
        "mode": mode,
        "date": str(datetime.date.today()),
        "load": load_before(),
        "exit_code": code,
        "deaths": dict(storm.deaths),
        "commands": storm.commands,
        "recorded_failures": len(records),
        "steps": len(storm.made),
        "steps_asked": args.steps,
        "steps_that_differ": different,
        "last_checkpoint_equal": tensors(work / "runs" / calm_name) == tensors(storm.run),
        "orphans": alive,
        "leftovers": hidden,
        "seconds_calm": calm_seconds,
        "seconds_storm": seconds,
        "recovery_seconds": statistics.median(storm.recovery) if storm.recovery else None,
    }


TEXT = """# Deaths of one run

{device}. {ranks} processes; kill -9 at random instants (`benchmarks/chaos.py`). Meshes: {meshes}. A step differs
if its loss, gradient norm, learning rate or token count is not that of the undisturbed run to the last bit, in any of
the sessions that made it. Recovery: median seconds from a death to the next step's line, with the start of Python and of
{ranks} processes on these cores.

| mesh | checkpoints | deaths | steps made | steps that differ | last checkpoint | orphans, files left | s calm | s storm | recovery, s | measured |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

{deaths} deaths in all. Other programs used the same cores meanwhile if the load says so; then the seconds are too high.
"""  # noqa: E501


def row(found: dict) -> str:
    kinds = ", ".join(f"{number} {kind}" for kind, number in found["deaths"].items())
    cells = [
        found["mesh"],
        found["mode"],
        f"{sum(found['deaths'].values())} ({kinds})",
        f"{found['steps']} of {found['steps_asked']}",
        str(len(found["steps_that_differ"])),
        "equal" if found["last_checkpoint_equal"] else "DIFFERENT",
        f"{len(found['orphans'])}, {len(found['leftovers'])}",
        f"{found['seconds_calm']:.0f}",
        f"{found['seconds_storm']:.0f}",
        f"{found['recovery_seconds'] or 0:.1f}",
        f"{found['date']}, {found['load']}",
    ]
    return f"| {' | '.join(cells)} |"


def page(found: list[dict], device: str) -> str:
    meshes = "; ".join(f"{name}: {json.dumps(mesh)}" for name, mesh in MESHES.items())
    rows = "\n".join(row(each) for each in found)
    deaths = sum(sum(each["deaths"].values()) for each in found)
    return TEXT.format(device=device, ranks=RANKS, meshes=meshes, rows=rows, deaths=deaths)


def earlier(file: Path, remade: set[tuple[str, str]]) -> list[dict]:
    """The rows of a file of results that this call does not measure again."""
    rows = json.loads(file.read_text()) if file.exists() else []
    return [row for row in rows if (row["mesh"], row["mode"]) not in remade]


def main() -> int:
    args = arguments()
    device = processor()
    found = []
    meshes, modes = args.meshes.split(","), args.modes.split(",")
    name = f"chaos-{slug(device)}"
    before = earlier(args.out / f"{name}.json", {(mesh, mode) for mesh in meshes for mode in modes})
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as folder:
        work = Path(folder)
        prepare(work)
        for mode in modes:
            for mesh in meshes:
                found.append(measure(work, mesh, mode, args))
                print(json.dumps(found[-1]), flush=True)
                if not args.quick:
                    rows = before + found
                    write_results(args.out, name, page(rows, device), rows, show=False)
    print(page(found, device))
    wrong = [
        f
        for f in found
        if f["exit_code"] or f["steps_that_differ"] or not f["last_checkpoint_equal"] or f["orphans"] or f["leftovers"]
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
