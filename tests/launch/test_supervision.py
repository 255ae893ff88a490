"""What the launcher does with ranks that fail, hang or are slow to stop; they are small programs here."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from weft.errors import UserError
from weft.launch import local
from weft.observe import status

RANK = """
import os, signal, sys, time
from weft.launch.failures import send_to_launcher
from weft.launch.local import join_launcher
from weft.observe.status import alive, doing

rank = int(os.environ["RANK"])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
join_launcher()
doing("step 7")
open(f"ready-{rank}", "w").close()
"""


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    """Run a program as ranks, with signals to the launcher once they are ready; exit code, stderr, processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "STOP_SECONDS", 1.0)
    monkeypatch.setattr(local, "FAIL_SECONDS", 1.0)
    monkeypatch.setattr(local, "WAIT_MESSAGE_SECONDS", 0.3)

    def run(program, *signals, nproc=2):
        def send():
            for number in signals:
                while not all((tmp_path / f"ready-{rank}").exists() for rank in range(nproc)):
                    done.wait(0.02)
                done.wait(0.3)
                os.kill(os.getpid(), number)

        done, sender = threading.Event(), threading.Thread(target=send)
        sender.start()
        code = local.launch_local([sys.executable, "-c", RANK + program], nproc, tmp_path / "run")
        sender.join()
        return code, capfd.readouterr().err

    return run


STUCK = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
while True: time.sleep(1)
"""


def test_ranks_that_do_not_answer_a_signal_are_named_and_killed(launch):
    code, errors = launch(STUCK, signal.SIGTERM)
    waiting, killed = errors.splitlines()
    assert code == 3
    assert waiting.startswith("waiting for rank 1 (process ")
    assert ", suspended by a signal): step 7; rank 0 (process " in waiting
    assert "step 7; the launcher kills them in 1 s if they make no progress" in waiting
    assert waiting.endswith(" (press Ctrl-C again to kill them now)")
    assert killed.startswith("killed after 1 s without progress: rank 1 (process ")
    assert "the run has no checkpoint yet, so the same command starts over" in killed


def test_a_deadline_ends_ranks_that_are_still_busy(launch, monkeypatch):
    monkeypatch.setenv("WEFT_STOP_WITHIN", "1")
    monkeypatch.setattr(local, "STOP_SECONDS", 60.0)
    code, errors = launch("while True: alive(); time.sleep(0.1)", signal.SIGTERM)
    assert code == 3
    assert "killed at the deadline of 1 s (--stop-within): rank 0 (process " in errors


def test_a_second_ctrl_c_kills_at_once(launch):
    code, errors = launch(STUCK, signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert "killed at the second Ctrl-C: rank 1 (process " in errors


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGTERM, 143, "terminated\n"), (signal.SIGINT, 130, "interrupted\n")]
)
def test_the_launcher_reports_a_signal_to_ranks_that_handle_none_yet(launch, number, code, said):
    dies = "while not asked: time.sleep(0.01)\nsignal.signal(15, signal.SIG_DFL)\nos.kill(os.getpid(), 15)\n"
    assert launch(dies, number) == (code, said)


@pytest.fixture
def half_seconds(monkeypatch):
    """For the launcher, half a second passes with each report of a rank, and no time without one, on any machine."""
    reports, update = [], status.Progress.update
    clock = SimpleNamespace(monotonic=lambda: len(reports) / 2)

    def updated(self, report):
        reports.append(report)
        update(self, report)

    monkeypatch.setattr(status.Progress, "update", updated)
    monkeypatch.setattr(local, "time", clock)
    monkeypatch.setattr(status, "time", clock)


@pytest.mark.usefixtures("half_seconds")
def test_a_rank_that_saves_may_take_its_time(launch):
    saves = """
while not asked: time.sleep(0.01)
for _ in range(25):
    time.sleep(0.02)
    doing("saving step 7")
sys.exit(143)
"""
    assert launch(saves, signal.SIGTERM, nproc=1) == (143, "")


def test_a_long_step_after_many_short_validation_batches_is_progress(launch):
    validates = """
time.sleep(0.8)
for _ in range(20): doing("step 8, validating", "validation")
doing("step 9")
while not asked: time.sleep(0.01)
time.sleep(1.6)
doing("saving step 9", "save")
sys.exit(143)
"""
    code, errors = launch(validates, signal.SIGTERM)
    assert (code, "killed after" in errors) == (143, False)


@pytest.mark.usefixtures("half_seconds")
def test_micro_batches_are_progress(launch):
    accumulates = """
while not asked: time.sleep(0.01)
for _ in range(25):
    time.sleep(0.02)
    alive()
sys.exit(143)
"""
    assert launch(accumulates, signal.SIGTERM, nproc=1) == (143, "")


def test_what_asks_for_more_time_gets_it(launch):
    syncs = """
while not asked: time.sleep(0.01)
doing("saving step 7", "save", may_take=600)
time.sleep(1.5)
sys.exit(143)
"""
    code, errors = launch(syncs, signal.SIGTERM)
    (line,) = errors.splitlines()
    assert (code, line.startswith("waiting for rank 0 (process ")) == (143, True)
    assert ": saving step 7; the launcher kills them in 60" in line


def test_the_others_end_with_a_rank_that_fails(launch):
    fails = """
if rank == 1:
    send_to_launcher("Traceback: the cause " + "x" * 200_000, "internal")
    sys.exit(1)
while True: time.sleep(1)
"""
    code, errors = launch(fails)
    assert code == 1
    assert "rank 1 failed:\nTraceback: the cause xxx" in errors
    assert errors.count("x") == 200_000


def test_no_rank_is_left_where_another_cannot_be_started(launch, monkeypatch):
    started, popen = [], subprocess.Popen

    def limited(*arguments, **settings):
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(popen(*arguments, **settings))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", limited)
    gc.collect()  # descriptors of earlier tests' garbage would close between the two counts
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError) as caught:
        launch("time.sleep(60)")
    assert str(caught.value).startswith("rank 1 of 2 cannot be started: Resource temporarily unavailable; use fewer")
    assert started[0].poll() == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) <= before


def test_ranks_get_the_environment_of_torchrun(launch, tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert launch(f'open(f"env-{{rank}}", "w").write(" ".join(os.environ[name] for name in {names}))') == (0, "")
    assert [(tmp_path / f"env-{rank}").read_text() for rank in (0, 1)] == ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"]
