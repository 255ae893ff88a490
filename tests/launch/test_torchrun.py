"""Under torchrun, ranks find hangs themselves, and the next attempt records how the last one failed."""

import json
import socket

import forked
import pytest
from running import QUIET, losses, train

# Rank 1 hangs in step 5 of the first attempt; rank 0, which has the store, is killed in step 9 of the second.
FAULTS = """
import os, signal, time

class Faults:
    def step(self, state):
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if state.rank == 1 and (attempt, state.step) == (0, 5):
            self.waits_for_ever()
        if state.rank == 0 and (attempt, state.step) == (1, 9):
            os.kill(os.getpid(), signal.SIGKILL)

    def waits_for_ever(self):
        while True:
            time.sleep(1)
"""
# What `torchrun --nproc-per-node 2 --max-restarts 2` does, but it forks the ranks from itself.
PROGRAM = """
import sys
import weft
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank(file):
    weft.Trainer(weft.RunConfig.load(file), fresh=True).fit()

rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "run_id": "none"}
config = LaunchConfig(1, 1, 2, max_restarts=2, start_method="fork", **rendezvous)
elastic_launch(config, rank)(sys.argv[1])
"""


def failures(run):
    return [json.loads(line) for line in (run / "logs" / "failures.jsonl").read_text().splitlines()]


def test_a_program_under_torchrun_survives_a_hang_and_a_kill(run_yaml, tmp_path):
    """Its losses are those of one process. torchrun's store outlives the ranks, with what they have written there."""
    (tmp_path / "faults.py").write_text(FAULTS)
    sections = {
        "schedule": {"warmup_steps": 0},
        "training": {"steps": 10, "batch_tokens": 256, "micro_batch_size": 2, "dtype": "float64"},
        "data": {"validation": None},
        "checkpoint": {"every": 4},
        "log": QUIET,
    }
    watched = sections | {"training": sections["training"] | {"hang_timeout": 2}}  # alone, it would start a process
    file = run_yaml(callbacks=[{"type": "faults:Faults"}], **watched)
    run = tmp_path / "runs" / "demo"
    done = forked.run(file, program=PROGRAM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert train(run_yaml("alone.yaml", run={"name": "alone"}, **sections)) == 0
    for mine, theirs in zip(losses(run), losses(tmp_path / "runs" / "alone"), strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-9)
    hang, kill = failures(run)
    assert (hang["attempt"], hang["rank"], hang["step"], hang["lost_steps"]) == (1, 1, 6, 1)
    assert hang["hang"]
    assert "without progress: rank " in hang["stderr"][0]
    assert "in waits_for_ever" in (run / "logs" / "stacks-1.txt").read_text()
    recorded = json.loads((run / "logs" / "collectives-1-rank-0.json").read_text())
    assert recorded["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    assert (kill["attempt"], kill["hang"], kill["rank"], kill["step"]) == (2, False, 0, 10)
    assert kill["stderr"] == ["the rank was killed, or its host was lost"]
    assert (kill["lost_steps"], kill["host"]) == (1, socket.gethostname())
    assert not list((run / "logs" / "ranks").glob("*"))
    assert not list(run.parent.glob("demo.old-*"))  # only the first attempt starts over
