"""How tests of whole runs start them, watch them and look at what they left."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from forked import Forked

import weft
from weft.cli.main import main
from weft.launch.rank import STACKS_SIGNAL

# What most runs here do without: it costs time and is tested elsewhere.
QUIET = {"trackers": []}

# A schedule of the user's own that gives signals time to arrive: constant, and every step takes a while.
SLOW = """
import time

class Slow:
    def __init__(self, total_steps: int, *, seconds: float = 0.03, warmup_steps: int = 0):
        self.seconds = seconds

    def __call__(self, step):
        time.sleep(self.seconds)
        return 1.0
"""


def replaced(path: Path, **sections) -> Path:
    """Give sections that `run_yaml` left out (None): it can only add keys to those that it has."""
    with path.open("a") as file:
        file.writelines(f"{name}: {json.dumps(value)}\n" for name, value in sections.items())
    return path


def metrics(run: Path) -> list[dict]:
    """The whole lines of a run's metrics, also while it is being written."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def losses(run: Path) -> list[tuple]:
    """(step, loss, norm of the gradient) of every line."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(run)]


def train(*arguments) -> int:
    """`weft train` in this process."""
    return main(["train", *map(str, arguments)])


def start(*arguments, cwd: Path, command: Sequence[str] = (sys.executable, "-m", "weft", "train")) -> subprocess.Popen:
    """`weft train` in a process of its own, with `cwd` as its working directory."""
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a test can signal the whole group, as `timeout` does
    )


def finish(process: subprocess.Popen | Forked, seconds: float = 90) -> tuple[int, str]:
    """Exit code and stderr of a process; it is ended if it takes too long, and its ranks' stacks are shown."""
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        shown = stacks(process.pid)
        process.kill()
        _, errors = process.communicate()
        raise AssertionError(f"still running after {seconds} s: {errors}\n{shown}") from None
    return process.returncode, errors


def stacks(launcher: int) -> str:
    """The Python stacks of the ranks of a launcher, and of their data workers.

    They write them into a file that has no name, after a signal. Its descriptor is in the rank's environment.
    """
    shown = []
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError, KeyError):
            file = Path(f"/proc/{process.pid}/fd/{process.environ()['WEFT_LAUNCHER'].split()[2]}")
            before = file.stat().st_size
            process.send_signal(STACKS_SIGNAL)
            time.sleep(0.5)
            written = file.read_bytes()[before:].decode(errors="replace")
            shown.append(f"{process.pid} {process.name()}, child of {process.ppid()}, {process.status()}:\n{written}")
    return "\n".join(shown)


def until_step(process: subprocess.Popen | Forked, run: Path, step: int, seconds: float = 60) -> None:
    """Wait until a running process has written down `step`."""
    end = time.monotonic() + seconds
    while not any(line["step"] >= step for line in metrics(run)):
        if process.poll() is not None or time.monotonic() > end:
            shown = stacks(process.pid) if process.poll() is None else ""
            process.kill()
            raise AssertionError(f"step {step} was never reached: {process.communicate()[1]}\n{shown}")
        time.sleep(0.005)


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's newest checkpoint, or of one checkpoint."""
    return weft.load_model(path).state_dict()


def assert_same_weights(one: Path, other: Path, within: float = 0.0) -> None:
    """Both have the same names and values, to the bit or `within` so much."""
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        if within:
            torch.testing.assert_close(value, other[name], rtol=0, atol=within, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(value, other[name]), name
