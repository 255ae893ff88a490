"""A process that reads ahead and dies, or a dataset that raises: one line that says where, no traceback."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from weft.data.batches.loader import BatchSource
from weft.errors import UserError


class Deadly:
    """Kills its process, or raises, at one sample."""

    def __init__(self, at: int, how: str):
        self.at, self.how = at, how

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == self.at:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "exit":
                os._exit(7)
            raise KeyError("no such\nrow")
        return {"tokens": np.arange(8)}


@pytest.mark.parametrize(("how", "said"), [("killed", "killed by SIGKILL"), ("exit", "exited with code 7")])
def test_a_worker_that_dies_is_reported_with_what_it_read(how, said):
    source = BatchSource(Deadly(22, how), batch_size=4, seed=None)
    seen = []
    with pytest.raises(UserError) as told:
        seen.extend(int(batch.samples[0]) for batch in source.iterate(2, 20, workers=2))
    text = str(told.value)
    assert "\n" not in text
    assert said in text
    assert "step 6, samples 20 to 23: the first is sample 20 of Deadly, the last sample 23 of Deadly" in text
    assert "data.workers" in text
    assert seen == [8, 12, 16][: len(seen)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_raises_is_reported_with_its_sample_and_line(workers):
    source = BatchSource(Deadly(9, "raise"), batch_size=4, seed=None)
    with pytest.raises(UserError, match=r"test_workers.py:\d+: Deadly\[9\] raised KeyError: .no such.nrow.; ") as told:
        list(source.iterate(0, 5, workers))
    assert "\n" not in str(told.value)


def test_a_signal_to_all_processes_leaves_the_workers_to_the_trainer():
    gc.collect()  # ends workers of loaders that earlier tests did not read to their end
    others = set(multiprocessing.active_children())
    batches = BatchSource(Deadly(-1, ""), batch_size=4, seed=None).iterate(0, 40, workers=1)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    stranger = subprocess.Popen(["sh", "-c", f"kill -TERM {worker.pid}; kill -INT {worker.pid}"])
    assert stranger.wait() == 0
    assert sum(len(batch.samples) for batch in batches) == 39 * 4

    batches = BatchSource(Deadly(-1, ""), batch_size=4, seed=None).iterate(0, 40, workers=1)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    worker.terminate()  # as this process does with one that is stuck
    worker.join(5)
    assert worker.exitcode == 0


TRAINER = """
import multiprocessing, sys, time
sys.path.insert(0, {here!r})
from test_workers import Deadly
from weft.data.batches.loader import BatchSource
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    batches = BatchSource(Deadly(-1, ""), batch_size=4, seed=None).iterate(0, 400, workers=2)
    next(batches)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.long)])
def test_workers_end_with_a_trainer_that_is_killed(tmp_path, method):
    (tmp_path / "trainer.py").write_text(TRAINER.format(here=str(Path(__file__).parent)))
    command = [sys.executable, "trainer.py", method]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [psutil.Process(int(word)) for word in trainer.stdout.readline().split()]
        assert len(workers) == 2
        trainer.kill()
    _, alive = psutil.wait_procs(workers, timeout=3)
    for process in alive:
        process.kill()
    assert not alive


class Joined:
    """Garbage whose destructor, as that of a process group, waits for a thread of the process that made it."""

    def __init__(self):
        self.itself, self.made_by = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.made_by:
            time.sleep(30)


class Collects(Deadly):
    def __getitem__(self, index):
        gc.collect()
        return super().__getitem__(index)


@pytest.mark.parametrize("collects", [False, True])
def test_a_worker_does_not_free_garbage_of_the_trainer(collects):
    gc.disable()
    try:
        Joined()
        before = gc.get_freeze_count()
        if collects:
            gc.enable()
        batches = BatchSource(Collects(-1, ""), batch_size=4, seed=None).iterate(0, 3, workers=1)
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGINT))  # raises KeyboardInterrupt
        signal.alarm(20)
        assert len(list(batches)) == 3
        assert gc.isenabled() == collects
        assert before - 1000 < gc.get_freeze_count() <= before  # some were freed since, none were added
    finally:
        signal.alarm(0)
        gc.enable()


def test_a_temporary_folder_of_too_long_a_path_is_reported_before_a_batch_is_waited_for(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 71)
    with pytest.raises(UserError, match="TMPDIR"):
        next(BatchSource(Deadly(-1, ""), batch_size=4).iterate(0, 3, workers=1))


def test_no_handler_is_left_that_raises_in_the_middle_of_other_work():
    before = signal.getsignal(signal.SIGCHLD)
    source = BatchSource(Deadly(-1, ""), batch_size=4)
    next(iter(source.iterate(0, 3, workers=1)))
    assert signal.getsignal(signal.SIGCHLD) == before
