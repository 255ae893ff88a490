"""How tests start hosts of an elastic run, which are processes of this machine."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from running import QUIET, SLOW

STEPS = 60


@pytest.fixture
def hosts(run_yaml, tmp_path):
    """Starts `weft train` as hosts of a run, each with its own name; kills what is left."""
    (tmp_path / "slow_for_launch.py").write_text(SLOW)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = []

    def start(file, *arguments, nodes="1:2"):
        command = [sys.executable, "-m", "weft", "train", file, "--nodes", nodes, "--nproc", "1", *arguments]
        process = subprocess.Popen(
            [*map(str, command), "--rendezvous", f"127.0.0.1:{port}"],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=(tmp_path / f"host-{len(started)}.txt").open("w"),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def sections(seconds=0.0, **changes):
    return {
        "schedule": {"type": "slow_for_launch:Slow", "warmup_steps": 0, "seconds": seconds},
        "training": {"steps": STEPS, "batch_tokens": 256, "micro_batch_size": 2, "dtype": "float64"},
        "parallel": {"dp_replicate": 2, "dp_shard": 1},
        "data": {"validation": None},
        "checkpoint": {"every": 5},
        "log": QUIET,
    } | changes


def meshes(run):
    return [session["mesh"]["dp_replicate"] for session in json.loads((run / "manifest.json").read_text())["sessions"]]


def until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
