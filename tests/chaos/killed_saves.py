"""Kills a run at its n-th operation on a file, for many n, and resumes it: is all there, and are the numbers the same?

    LD_PRELOAD=killer.so python killed_saves.py MODE WORK KILLS

Kills at `KILLS` evenly spread operations, at each one if it is 0. `MODE` is a mode of `test_every_file_operation.py`;
`WORK` has the config `run.yaml`. This process imports everything once and forks for each run, so a run costs no start
of Python. Prints JSON: the number of operations, each fault found, the number of kills.
"""

import ctypes
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch

import weft.checkpoint.late_copy
import weft.train.recorder
from weft import RunConfig, Trainer
from weft.errors import UserError

LOST = "remote, host lost"  # the run directory is deleted after the kill
FOLLOW = 1_000_003  # a resumed run is killed too, at an operation that depends on n


class Saves:
    """A callback that tells the parent which checkpoints are complete."""

    def saved(self, state) -> None:
        os.write(int(os.environ["SAVED"]), b"%d\n" % state.step)


def train() -> int:
    Trainer(CONFIG).fit()
    (Path.cwd() / "modules").write_text("\n".join(sys.modules))
    return 0


def child(work: Path, at: int, run=train) -> tuple[int, int, str]:
    """Calls `run` in a process of its own, which dies at operation `at` (0: not at all).

    Returns:
        The signal or exit code as for subprocess, the last step that it reported as saved, and what it printed.
    """
    reading, writing = os.pipe()
    said = work / "said.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ["SAVED"] = str(writing)
            os.chdir(work)
            output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            count = os.open(work / "count", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            SHIM.kill_at(str(work / "files").encode(), at, count)
            code = run()
        except UserError as error:
            code = print(error) or 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        steps = [int(line) for line in pipe]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, max(steps, default=0), said.read_text()


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint by its own list of digests; read without Weft."""
    try:
        listed = json.loads((checkpoint / "checksums.json").read_bytes())["files"]
        for name, entry in listed.items():
            if hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() != entry["sha256"]:
                return f"{checkpoint}: {name} differs"
        missing = {"index.json", "state.json", "model.json", "optimizer.json"} - set(listed)
        return f"{checkpoint}: no {missing}" if missing else None
    except (OSError, ValueError, KeyError) as error:
        return f"{checkpoint}: {error!r}"


def found(folder: Path, pattern: str) -> dict[int, Path]:
    """Step -> checkpoint, of those with a visible name."""
    return {int(path.name.removeprefix("step-")): path for path in folder.glob(pattern)}


def result(run: Path) -> dict:
    """What must not depend on kills: the numbers of each step, and the bytes of the last checkpoint's tensors."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "lr", "tokens", "validation_loss")
    last = max(run.glob("checkpoints/step-*"))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(last.glob("*.safetensors"))}
    return {
        "losses": [[line["step"], *(line.get(name) for name in names)] for line in lines],
        "tensors": digests,
        "checkpoints": sorted(path.name for path in run.glob("checkpoints/[!.]*")),  # `look_after` sees hidden folders
    }


class Killed:
    """A run in `work/files/runs/demo` that is killed at operation `n`, looked at and resumed."""

    def __init__(self, mode: str, work: Path, calm: dict):
        self.mode, self.work, self.files, self.calm = mode, work, work / "files", calm
        self.run = self.files / "runs" / "demo"
        self.faults: list[str] = []

    def start(self, n: int) -> None:
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir()

    def check(self, n: int, second: bool) -> list[str]:
        """Kills a run at `n`, and once more while it resumes if `second`; returns the faults."""
        self.faults = []
        self.start(n)
        code, saved, said = child(self.work, n)
        if code != -signal.SIGKILL:
            return [f"was not killed: {code}: {said[-2000:]}"]
        expected = self.look(saved)
        if second:
            code, more, said = child(self.work, n * FOLLOW % self.calm["operations"] + 1)
            if code not in (0, -signal.SIGKILL):
                return [*self.faults, f"first resume: exit code {code}: {said[-2000:]}"]
            expected = self.look(more if self.mode == LOST else max(saved, more))
        code, _, said = child(self.work, 0)
        if code != 0 or "Traceback" in said:
            return [*self.faults, f"resume: exit code {code}: {said[-2000:]}"]
        self.look_after(expected)
        return self.faults

    def look(self, saved: int) -> int:
        """After a kill. Returns the step from which the run must resume; -1: any."""
        durable, local = found(self.run, "checkpoints/step-*"), found(self.files, "local/*/[!.]*/checkpoints/step-*")
        stored = found(self.files, "store/demo/*/step-*")
        stored = {step: path for step, path in stored.items() if (path / "complete.json").exists()}
        everything = [*durable.values(), *local.values(), *stored.values()]
        self.faults += [fault for path in everything if (fault := damage(path)) is not None]
        if max(durable, default=0) < saved:
            self.faults.append(f"step {saved} was saved, but the run has {sorted(durable)}")
        if self.mode == LOST:
            shutil.rmtree(self.run, ignore_errors=True)
            durable = {}
        return max([*durable, *local, *stored], default=0)

    def look_after(self, expected: int) -> None:
        """After the resume: the same numbers, and nothing is left."""
        sessions = json.loads((self.run / "manifest.json").read_text())["sessions"]
        first = sessions[-1]["step"]
        if first != expected and expected < self.calm["losses"][-1][0]:  # a finished run begins no session
            self.faults.append(f"resumed at {first} instead of {expected}")
        final = result(self.run)
        for name, value in final.items():
            if name == "checkpoints" and self.mode == "keep_best":
                # Of the last validation the undisturbed run knows only after its last save, so it keeps one more.
                if not {"best", value[-1]} <= set(value) <= set(self.calm[name]):
                    self.faults.append(f"kept {value}")
                if not (self.run / "checkpoints" / "best" / "checksums.json").exists():
                    self.faults.append("the link to the best checkpoint leads nowhere")
            elif value != self.calm[name]:
                self.faults.append(f"{name} differ: {value} instead of {self.calm[name]}")
        hidden = [str(p.relative_to(self.files)) for p in self.files.rglob(".*.partial") if p.is_dir()]
        hidden += [str(p.relative_to(self.files)) for p in self.files.rglob(".step-*.old")]
        hidden += [str(p) for p in self.files.glob("local/*/*")]
        store = list((self.files / "store" / "demo").glob("*/step-*"))
        hidden += [str(path) for path in store if not (path / "complete.json").exists()]
        if hidden:
            self.faults.append(f"left: {hidden}")
        if store:
            if str(max(path.name for path in store)) != max(final["checkpoints"]):
                self.faults.append(f"the store has {store}")
            (lines,) = (self.files / "store" / "demo").glob("*/run/metrics.jsonl")
            if lines.read_bytes() != (self.run / "metrics.jsonl").read_bytes():
                self.faults.append("the store has other metrics than the run")


def main() -> None:
    mode, work, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    peak = weft.train.recorder.device_peak(torch.device("cpu"), torch.float32)
    weft.train.recorder.device_peak = lambda *_: peak  # measured once: only the MFU needs it
    weft.checkpoint.late_copy._SMALL = 0  # so that these small tensors are copied beside the next step, too
    killed = Killed(mode, work, {})
    killed.start(0)
    code, _, said = child(work, 0)
    assert code == 0, said
    for name in (work / "modules").read_text().splitlines():  # which a run imports late
        if name.startswith("weft."):
            importlib.import_module(name)
    names = [line.split(" ", 2) for line in (work / "count").read_text().splitlines()]
    killed.calm = result(killed.run) | {"operations": len(names)}
    most = len(names)
    numbers = [1 + (2 * turn + 1) * most // (2 * kills) for turn in range(kills)] if kills else range(1, most + 1)
    print(json.dumps({"operations": len(names), "kinds": sorted({what for _, what, _ in names})}), flush=True)
    for turn, n in enumerate(numbers):
        for fault in killed.check(n, second=turn % 2 == 1):
            print(json.dumps({"n": n, "at": " ".join(names[n - 1][1:]), "fault": fault}), flush=True)
    print(json.dumps({"kills": len(numbers)}), flush=True)


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    CONFIG = RunConfig.load("run.yaml")
    torch.set_num_threads(1)
    SHIM = ctypes.CDLL(os.environ["LD_PRELOAD"])
    main()
