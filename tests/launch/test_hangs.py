"""Ranks that hang are found, their stacks are written, and the run goes on without them."""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import forked
import pytest
from running import QUIET, losses

from weft.launch import hang, supervisor
from weft.launch.rank import Rank
from weft.launch.supervisor import Supervisor, supervise
from weft.observe import status
from weft.observe.status import START_SECONDS, Progress

RANK = """
import os, signal, sys, time
from pathlib import Path
from weft.launch.local import join_launcher
from weft.observe.status import alive, doing

rank = int(os.environ["RANK"])
join_launcher()
first = not Path(f"began-{rank}").exists()
Path(f"began-{rank}").write_text(str(os.getpid()))

def wait_for(reached):
    while not reached():
        time.sleep(0.01)
"""


def failures(run):
    return [json.loads(line) for line in (run / "logs" / "failures.jsonl").read_text().splitlines()]


@pytest.fixture
def supervised(tmp_path, monkeypatch, capfd):
    """Supervise a small program on two ranks with a time-out of a second; exit code, stderr, run directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.05)
    monkeypatch.setattr(hang, "STACK_SECONDS", 60.0)

    def run(program, most=5, ranks=2):
        command = [sys.executable, "-c", RANK + program]
        code = supervise(command, ranks, tmp_path / "run", Supervisor(most, hang_timeout=1.0))
        return code, capfd.readouterr().err, tmp_path / "run"

    return run


def test_a_suspended_rank_is_named_and_the_stacks_of_all_are_written(supervised, monkeypatch):
    """The launcher looks for hangs only once the ranks hang: a loaded machine can take a second for anything else."""
    hangs = hang.HangWatch.hangs
    monkeypatch.setattr(hang.HangWatch, "hangs", lambda *given: Path("hung").exists() and hangs(*given))
    code, errors, run = supervised("""
def waits_for_the_other():
    other = Path("began-1")
    wait_for(lambda: other.exists() and other.read_text() and
             Path(f"/proc/{other.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    Path("hung").touch()
    time.sleep(60)

if not first:
    Path("hung").unlink(missing_ok=True)
for step in (5, 6, 7, 8):
    doing(f"step {step}", step=step)
if first and rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    doing("step 9", step=9)  # the launcher continues the rank, which then writes its stacks
if first and rank == 0:
    waits_for_the_other()
elif first:
    time.sleep(60)
""")
    assert code == 0
    (failure,) = failures(run)
    assert (failure["rank"], failure["hang"], failure["signal"], failure["doing"]) == (1, True, None, "step 8")
    assert failure["step"] == 8
    assert failure["restarted"]
    (line,) = errors.splitlines()
    assert "without progress: rank 1 (process " in line
    assert f"; the stacks of all ranks are in {run / 'logs' / 'stacks-1.txt'}; restart 1 of 5" in line
    stacks = (run / "logs" / "stacks-1.txt").read_text()
    assert stacks.index(", suspended by a signal): step 8") < stacks.index("rank 0 (process ")
    assert "in waits_for_the_other" in stacks.partition("rank 0 (process ")[2]


def test_without_restarts_a_hang_ends_the_run(supervised):
    code, errors, run = supervised('for step in (1, 2, 3): doing("step", step=step)\ntime.sleep(60)', most=0)
    assert code == 3
    assert "the run has no checkpoint yet" in errors
    assert [entry["restarted"] for entry in failures(run)] == [False]


def test_progress_and_long_tasks_are_no_hang(supervised, monkeypatch):
    """The rank moves the launcher's clock, and waits until the launcher has read each report and looked for a hang."""

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic():
            now = os.readlink("clock")
            Path(f"looked-{now}").touch()
            return float(now)

    os.symlink("0", "clock")
    monkeypatch.setattr(hang, "time", Clock)
    monkeypatch.setattr(status, "time", Clock)
    update, reports = Progress.update, itertools.count(1)
    monkeypatch.setattr(Rank, "update", lambda *given: (update(*given), Path(f"read-{next(reports)}").touch()))
    code, errors, run = supervised(
        """
import itertools

now, reports = 0.0, itertools.count(1)

def pass_time(seconds):
    global now
    now += seconds
    os.symlink(f"{now:g}", "next")
    os.replace("next", "clock")
    wait_for(Path(f"looked-{now:g}").exists)

def report(what, *words, **more):
    what(*words, **more)
    wait_for(Path(f"read-{next(reports)}").exists)

for step in (1, 2, 3):
    report(doing, "step", step=step)
for _ in range(5):
    pass_time(0.9)
    report(alive)
report(doing, "saving", "save", may_take=60)
pass_time(50)
""",
        ranks=1,
    )
    assert (code, errors, (run / "logs").exists()) == (0, "", False)


def test_the_default_adapts_to_the_steps():
    rank = Progress(longest=0.5)
    assert rank.allowed(None) == START_SECONDS
    rank.step = rank.first_step = 40
    assert rank.allowed(None) == START_SECONDS  # compilation
    rank.step = 42
    assert rank.allowed(None) == 60
    rank.longest = 30
    assert rank.allowed(None) == 300
    rank.may_take = 600
    assert rank.allowed(None) == 600
    assert rank.allowed(5.0) == 600


HANGS = """
import time
from pathlib import Path
from weft.observe.status import alive

class Hangs:
    def begin(self, state):
        self.state = state
        if state.rank == 1 and not Path("hung").exists():
            state.model.register_forward_pre_hook(self.forward)

    def forward(self, *_):
        if self.state.step == 6:
            Path("hung").touch()
            time.sleep(0.7)  # meanwhile, the other rank waits in a collective of the same step
            alive()
            self.waits_for_ever()

    def waits_for_ever(self):
        while True:
            time.sleep(1)
"""


@pytest.mark.long
def test_a_run_goes_on_after_a_rank_that_hangs(run_yaml, tmp_path):
    """The run ends as if nothing had happened. The rank is named, although the other one has waited for longer."""
    (tmp_path / "hangs_once.py").write_text(HANGS)
    file = run_yaml(
        schedule={"warmup_steps": 0},
        training={"steps": 9, "batch_tokens": 256, "micro_batch_size": 2, "hang_timeout": 3},
        callbacks=[{"type": "hangs_once:Hangs"}],
        data={"validation": None},
        checkpoint={"every": 4},
        log=QUIET,
    )
    run = tmp_path / "runs" / "demo"
    done = forked.run("train", file, "--nproc", "2", "--max-restarts", "3", cwd=tmp_path, ranks=True)
    assert done.returncode == 0, done.stderr
    (failure,) = failures(run)
    assert (failure["rank"], failure["hang"], failure["step"]) == (1, True, 7)
    assert failure["lost_steps"] == 2
    assert "in waits_for_ever" in (run / "logs" / "stacks-1.txt").read_text()
    assert [step for step, *_ in losses(run)] == list(range(1, 10))
