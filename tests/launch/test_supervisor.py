"""Runs that are killed and restarted: what is recorded, how long the supervisor goes on, and equal results."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from forked import Forked
from launch_parts import none_left_in, processes_in, ranks_of
from running import QUIET, SLOW, finish, losses, train, until_step

from weft.launch import supervisor
from weft.launch.supervisor import Supervisor, supervise

RANK = """
import os, signal, sys, time
from pathlib import Path
from weft.launch.failures import send_to_launcher
from weft.launch.local import join_launcher
from weft.observe.status import alive, doing

rank, attempt = int(os.environ["RANK"]), len(list(Path().glob(f"attempt-{os.environ['RANK']}-*")))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
join_launcher()
Path(f"attempt-{rank}-{attempt}").touch()
while len(list(Path().glob(f"attempt-*-{attempt}"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.005)  # a rank that is stopped before it has begun would count its attempts wrongly
"""


def failures(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "logs" / "failures.jsonl").read_text().splitlines()]


@pytest.fixture
def supervised(tmp_path, monkeypatch, capfd):
    """Supervise a small program on two ranks; exit code, stderr, run directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.05)

    def run(program, most=5, once=(), nproc=2):
        command = [sys.executable, "-c", RANK + program]
        code = supervise(command, nproc, tmp_path / "run", Supervisor(most), once)
        return code, capfd.readouterr().err, tmp_path / "run"

    return run


def test_a_failure_is_recorded_with_its_last_lines_and_the_run_goes_on(supervised):
    code, errors, run = supervised("""
doing("step 7", step=7 + attempt)
if attempt < 2 and rank == 1:
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV) if attempt else os._exit(9)
time.sleep(0 if attempt == 2 else 60)
""")
    assert code == 0
    first, second = failures(run)
    assert (first["rank"], first["exit_code"], first["signal"], first["step"]) == (1, 9, None, 7)
    assert (second["rank"], second["exit_code"], second["signal"], second["step"]) == (1, None, "SIGSEGV", 8)
    assert [entry["attempt"] for entry in (first, second)] == [1, 2]
    assert all(entry["stderr"] == ["about to die"] and entry["restarted"] for entry in (first, second))
    assert all(entry["doing"] == "step 7" and entry["host"] == socket.gethostname() for entry in (first, second))
    assert (first["lost_steps"], second["lost_steps"]) == (6, 7)
    assert errors.count("about to die") == 2
    assert "was killed by SIGSEGV; restart 2 of 5 from the beginning now" in errors


def test_ranks_that_all_die_are_one_failure(supervised):
    code, errors, run = supervised("""
doing("step 7", step=7)
if attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
""")
    assert code == 0, errors
    (failure,) = failures(run)
    assert (failure["signal"], failure["attempt"], failure["restarted"]) == ("SIGKILL", 1, True)


def test_a_step_that_always_fails_ends_the_run(supervised):
    code, errors, run = supervised("""
doing("step 7", step=7)
send_to_launcher("Traceback:\\nbroken link", "internal") if rank else time.sleep(60)
sys.exit(1)
""")
    assert code == 1
    assert "the run failed 3 times in step 7, without progress" in errors
    assert [entry["restarted"] for entry in failures(run)] == [True, True, False]
    assert failures(run)[0]["stderr"] == ["Traceback:", "broken link"]


def test_restarts_are_limited(supervised):
    code, errors, run = supervised('doing("step", step=attempt + 1)\nos.kill(os.getpid(), signal.SIGKILL)', 2, nproc=1)
    assert code == 3
    assert "no restart is left of 2 (--max-restarts)" in errors
    assert [entry["step"] for entry in failures(run)] == [1, 2, 3]


@pytest.mark.parametrize(("kind", "code"), [("mistake", 2), ("custom", 2), ("non-finite", 1)])
def test_what_a_restart_cannot_mend_is_not_restarted(supervised, tmp_path, kind, code):
    assert supervised(f'send_to_launcher("text", "{kind}")\nsys.exit({code})', nproc=1)[0] == code
    assert len(list(tmp_path.glob("attempt-0-*"))) == 1


def test_a_signal_to_a_rank_is_not_a_failure(supervised, tmp_path):
    assert supervised("os.kill(os.getpid(), signal.SIGTERM) if rank else time.sleep(60)")[0] == 143
    assert len(list(tmp_path.glob("attempt-1-*"))) == 1


def test_options_of_the_first_attempt_are_left_out_once_training_has_begun(supervised, tmp_path):
    program = """
Path(f"arguments-{attempt}").write_text(" ".join([os.environ["TORCHELASTIC_RESTART_COUNT"], *sys.argv[1:]]))
if attempt: doing("step", step=1)
sys.exit(5 if attempt < 2 else 0)
"""
    assert supervised(program, once=["--fresh"], nproc=1)[0] == 0
    assert [(tmp_path / f"arguments-{n}").read_text() for n in range(3)] == ["0 --fresh", "1 --fresh", "2"]


def test_the_delay_doubles_and_is_reset_by_progress():
    one = Supervisor(50)
    delays = [one.delay(step, True)[0] for step in (5, 4, 3, 2, 6, 5)]
    assert delays == [0, 1, 2, 4, 0, 1]
    assert [one.delay(0, True)[0] for _ in range(7)] == [2, 4, 8, 16, 32, 60, 60]


def test_a_window_forgets_old_restarts(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    one = Supervisor(2, window=100)
    for step, at, restarts in ((1, 0, True), (2, 50, True), (3, 90, False), (4, 101, True), (5, 149, False)):
        clock[0] = at
        assert (one.delay(step, True)[0] is not None) is restarts


@pytest.mark.xdist_group("ranks")
def test_a_run_with_deaths_equals_a_run_without(run_yaml, tmp_path, monkeypatch, ranks):
    (tmp_path / "slow_for_launch.py").write_text(SLOW)

    def file(name):
        return run_yaml(
            f"{name}.yaml",
            run={"name": name},
            schedule={"type": "slow_for_launch:Slow", "warmup_steps": 0},
            training={"steps": 14, "batch_tokens": 128, "micro_batch_size": 2},
            data={"validation": None, "workers": 1},
            checkpoint={"every": 3},
            log=QUIET,
        )

    run = tmp_path / "runs" / "killed"
    command = ("train", file("killed"), "--nproc", "2", "--max-restarts", "9")
    process = Forked(*command, "--fresh", cwd=tmp_path, ranks=True)
    until_step(process, run, 5)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    until_step(process, run, 8)
    assert len(processes_in(tmp_path)) >= 3
    process.kill()  # the launcher, which takes its ranks with it; then the user gives the same command again
    assert finish(process)[0] == -signal.SIGKILL
    assert none_left_in(tmp_path)
    assert losses(run)[-1][0] < 14  # they did not go on
    process = Forked(*command, cwd=tmp_path, ranks=True)
    code, errors = finish(process)
    assert code == 0, errors
    (failure,) = failures(run)
    assert (failure["rank"], failure["signal"], failure["attempt"]) == (1, "SIGKILL", 1)
    assert 0 <= failure["lost_steps"] <= 3
    assert 0 <= failure["lost_seconds"] < 60
    assert failure["doing"].startswith(("step ", "saving"))

    monkeypatch.syspath_prepend(tmp_path)
    whole = file("whole")  # the fork server's ranks have no workers; they change no result
    whole.write_text(whole.read_text().replace('"workers": 1', '"workers": 0'))
    ranks.run(whole, 2)
    assert losses(run) == losses(tmp_path / "runs" / "whole")
    weights = [
        sorted((tmp_path / "runs" / name / "checkpoints" / "step-00000014").glob("*.safetensors"))
        for name in ("killed", "whole")
    ]
    assert len(weights[0]) == len(weights[1]) > 0
    for one, other in zip(*weights, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.fixture
def _hang_up():
    """Processes inherit SIGHUP's default action, also if nohup runs the tests: Weft leaves an ignored SIGHUP alone."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


TELLS = """
import os
from pathlib import Path

Path("schedule.txt").write_text(f"{os.getpid()} {os.environ.get('LOCAL_RANK')}")
"""


@pytest.mark.usefixtures("_hang_up")
def test_one_process_is_supervised_and_hang_up_saves_and_leaves(run_yaml, tmp_path):
    (tmp_path / "slow_for_launch.py").write_text(SLOW + TELLS)
    file = run_yaml(
        schedule={"type": "slow_for_launch:Slow", "warmup_steps": 0},
        training={"steps": 2000, "batch_tokens": 256, "micro_batch_size": 2},
        data={"validation": None},
        checkpoint={"every": 3},
        log=QUIET,
    )
    run = tmp_path / "runs" / "demo"
    process = Forked("train", file, "--nproc", "1", "--max-restarts", "2", cwd=tmp_path, ranks=True)
    until_step(process, run, 4)
    (rank,) = ranks_of(process.pid)
    assert (tmp_path / "schedule.txt").read_text() == f"{rank} 0"
    os.kill(rank, signal.SIGKILL)
    until_step(process, run, 7)
    process.send_signal(signal.SIGHUP)
    code, errors = finish(process)
    assert code == 128 + signal.SIGHUP, errors
    assert (run / "checkpoints" / f"step-{losses(run)[-1][0]:08}").is_dir()
    assert len(failures(run)) == 1


def test_wrong_options_are_refused(run_yaml, capsys, monkeypatch):
    assert train(run_yaml(), "--max-restarts", "-1") == 2
    assert "--max-restarts -1" in capsys.readouterr().err
    assert train(run_yaml(), "--restart-window", "10") == 2
    assert "--max-restarts N" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert train(run_yaml(), "--max-restarts", "1") == 2
    assert "torchrun's --max-restarts" in capsys.readouterr().err
