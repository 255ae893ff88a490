"""N processes on this machine: how they end, and what they say."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from glob import glob
from pathlib import Path

import forked
import pytest
from forked import Forked
from launch_parts import none_left_in, ranks_of, trained
from running import QUIET, SLOW, finish, losses, start, train, until_step

from weft.cli.main import main
from weft.launch import local
from weft.observe.manifest import read_manifest


def slow_run(run_yaml, tmp_path, steps=2000):
    """A run that would take minutes."""
    (tmp_path / "slow_for_launch.py").write_text(SLOW)
    return run_yaml(
        schedule={"type": "slow_for_launch:Slow", "warmup_steps": 0},
        training={"steps": steps, "batch_tokens": 256, "micro_batch_size": 2},
        data={"validation": None, "workers": 1},
        checkpoint={"every": steps},
        log=QUIET,
    )


def test_a_killed_rank_is_reported_in_one_line_and_a_stopped_run_resumes(run_yaml, tmp_path, capsys, monkeypatch):
    scratch, run = Path(tempfile.mkdtemp()), tmp_path / "runs" / "demo"
    monkeypatch.setenv("TMPDIR", str(scratch))
    file = slow_run(run_yaml, tmp_path)
    arguments = (file, "checkpoint.every=3", "--nproc", "2")
    process = Forked("train", *arguments, cwd=tmp_path, ranks=True)
    until_step(process, run, 3)
    assert read_manifest(run)["command"].endswith(f"train {file} checkpoint.every=3 --nproc 2")

    monkeypatch.chdir(tmp_path)
    assert train(file) == 2  # a second one on the same directory
    error = capsys.readouterr().err
    assert "another process (process " in error  # rank 0, which holds the lock
    assert "is training in this run directory" in error
    until_step(process, run, losses(run)[-1][0] + 1)  # the first one is not disturbed
    monkeypatch.chdir("/")

    victim = ranks_of(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    code, errors = finish(process)
    saved = int(max((run / "checkpoints").glob("step-*")).name[5:])
    assert code == 3
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith(f"rank 1 (process {victim}) was killed by SIGKILL")
    assert f"the same command resumes from the last checkpoint, of step {saved};" in errors.splitlines()[-1]
    assert "Traceback" in (run / "logs" / "rank-00000.log").read_text()
    assert none_left_in(tmp_path)

    process = Forked("train", *arguments, cwd=tmp_path, ranks=True)
    until_step(process, run, saved + 4)  # the killed session reached less
    process.send_signal(signal.SIGINT)
    code, errors = finish(process)
    assert code == 128 + signal.SIGINT, errors
    assert "Traceback" not in errors
    left_at = losses(run)[-1][0]
    assert (run / "checkpoints" / f"step-{left_at:08}").is_dir()
    assert f"stopped after step {left_at}, saved" in errors
    assert none_left_in(tmp_path)
    assert not [path.name for path in scratch.iterdir() if "elastic" in path.name or "weft" in path.name]
    shutil.rmtree(scratch)
    monkeypatch.delenv("TMPDIR")

    # The same command resumes from there, on as many ranks as it likes, and says when there is nothing left to do.
    monkeypatch.chdir(tmp_path)
    end = f"training.steps={left_at + 2}"
    assert train(file, end, "--accept-changes") == 0
    assert f"resumes after step {left_at}" in capsys.readouterr().err
    assert [step for step, *_ in losses(run)] == list(range(1, left_at + 3))
    assert train(file, end, "--accept-changes") == 0
    assert "this run is finished" in capsys.readouterr().err
    assert len(losses(run)) == left_at + 2

    # --fresh begins again and deletes nothing.
    before = (run / "metrics.jsonl").read_bytes()
    assert train(file, "training.steps=1", "--fresh") == 0
    assert [step for step, *_ in losses(run)] == [1]
    (old,) = run.parent.glob("demo.old-*")
    assert (old / "metrics.jsonl").read_bytes() == before
    assert (old / "checkpoints" / f"step-{left_at:08}").is_dir()


TERMINATES = """
import os, signal

class Terminates:
    def step(self, state):
        if state.step == 4 and state.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.xdist_group("ranks")
def test_a_signal_to_any_rank_stops_all(run_yaml, tmp_path, ranks):
    (tmp_path / "terminates_for_launch.py").write_text(TERMINATES)
    file = run_yaml(
        training={"steps": 40, "batch_tokens": 256, "micro_batch_size": 2},
        callbacks=[{"type": "terminates_for_launch:Terminates"}],
        data={"validation": None},
        log=QUIET,
    )
    (first, errors), (second, _) = ranks.call(trained, 2, tmp_path, [[str(file)]] * 2, one_host())
    assert (first, second) == (143, 143), errors
    left_at = losses(tmp_path / "runs" / "demo")[-1][0]
    assert 4 <= left_at <= 6
    assert f"stopped after step {left_at}, saved" in errors
    assert (tmp_path / "runs" / "demo" / "checkpoints" / f"step-{left_at:08}").is_dir()


LAUNCHES_ONCE = """
import os, sys
from weft.cli.main import main

os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # what Weft sets for itself at its first run
before = dict(os.environ)
code = main(sys.argv[1:])
sys.exit(code if os.environ == before else f"environment: {before}")
"""


def test_a_mistake_that_only_ranks_can_see_is_one_line(run_yaml, tmp_path):
    """And the launcher leaves its own environment as it was: what the same process starts afterwards is no rank."""
    in_the_way = tmp_path / "a_file"
    in_the_way.write_text("")
    file = run_yaml(run={"directory": str(in_the_way)}, log=QUIET)
    done = forked.run("train", file, "--nproc", "2", cwd=tmp_path, program=LAUNCHES_ONCE, ranks=True)
    assert done.returncode == 2, done.stderr
    # A rank that is late finds the store of the first one closed, of which torch's own log may have lines.
    (line,) = [line for line in done.stderr.strip().splitlines() if not re.match(r"\[[WE]\d{4} ", line)]
    assert "the run directory cannot be created" in line
    assert "set run.directory" in line
    assert str(in_the_way) in line


def test_a_mistake_in_the_file_is_reported_before_any_rank_starts(run_yaml, tmp_path):
    began = time.monotonic()
    process = start(run_yaml(training={"stepz": 3}), "--nproc", 2, cwd=tmp_path)
    code, errors = finish(process)
    assert code == 2
    assert time.monotonic() - began < 30
    (line,) = errors.strip().splitlines()
    assert "run.yaml:" in line
    assert "stepz" in line
    assert "steps" in line


def test_more_processes_than_a_machine_has_room_for_are_refused(run_yaml, capsys):
    assert main(["train", str(run_yaml()), "--nproc", "99999"]) == 2
    assert "--nproc 99999: this machine has" in capsys.readouterr().err


def test_the_launcher_of_ranks_imports_no_torch(run_yaml, tmp_path):
    """A rank starts only after the launcher's imports; torch would double the time of the start."""
    program = (
        "import sys; from pathlib import Path; from weft.cli.main import main; from weft.launch import supervisor; "
        "supervisor.supervise = lambda command, ranks, *_: print(ranks, 'torch' in sys.modules) or 0; "
        "sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, "train", str(run_yaml()), "--nproc", "2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", str(any(glob(path) for path in local.GPU_PATHS))]


def test_gpus_without_device_files_are_counted(monkeypatch):
    """After a boot, CUDA's first call makes /dev/nvidia*, with nvidia-modprobe."""
    installed = "/usr/bin/nvidia-modprobe"
    monkeypatch.setattr(local, "glob", lambda path: [path] if path == installed else [])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert local.gpu_count() == 8


def one_host():
    """Variables that name a free port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}


@pytest.mark.xdist_group("ranks")
def test_ranks_with_another_mesh_and_other_data_end_at_once(run_yaml, tmp_path, tiny_heldout, ranks):
    file = run_yaml(parallel={"dp_shard": 2}, log=QUIET)
    changes = ["parallel.dp_shard=1", "parallel.tp=2", f"data.train={tiny_heldout}"]
    (first, line), second = ranks.call(trained, 2, tmp_path, [[str(file)], [str(file), *changes]], one_host())
    assert (first, second) == (2, (2, ""))
    assert len(line.splitlines()) == 1
    assert line.startswith("rank 1 differs from rank 0: data.train digest ")
    assert "parallel.dp_shard 1 (rank 0: 2), parallel.tp 2 (rank 0: 1)" in line
    assert not (tmp_path / "runs").exists()


ROWS = """
class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i == 17:
            raise KeyError("seventeen")
        return {"tokens": [(i + k) % 512 for k in range(64)]}
"""


def test_ranks_that_share_a_row_tell_its_mistake_once(run_yaml, tmp_path):
    (tmp_path / "rows_for_launch.py").write_text(ROWS)
    data = {"train": {"type": "rows_for_launch:Rows"}, "validation": None, "shuffle": False}
    file = run_yaml(data=data, training={"steps": 9, "batch_tokens": 256}, schedule={"warmup_steps": 0}, log=QUIET)
    done = forked.run("train", file, "parallel.cp=2", "--nproc", "2", cwd=tmp_path, ranks=True)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "Rows[17] raised KeyError: 'seventeen'" in line]
    assert "rows_for_launch.py:8: " in line
