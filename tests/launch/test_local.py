"""N processes on this machine: how they end, and what they say."""

import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

from running import QUIET, SLOW, finish, losses, start, train, until_step

from weft.cli.main import main


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


def processes_in(folder: Path) -> set[int]:
    """The living processes that work in `folder`: a launcher, its ranks and their loaders."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and Path(os.readlink(process / "cwd")) == folder:
                found.add(int(process.name))
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found


def none_left_in(folder: Path, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not processes_in(folder):
            return True
        time.sleep(0.05)
    return False


def test_a_running_run_is_not_disturbed_and_leaves_saved_on_sigint(run_yaml, tmp_path, capsys, monkeypatch):
    file, run = slow_run(run_yaml, tmp_path), tmp_path / "runs" / "demo"
    process = start(file, "--nproc", 2, cwd=tmp_path)
    until_step(process, run, 3)

    monkeypatch.chdir(tmp_path)
    assert train(file) == 2  # a second one on the same directory
    error = capsys.readouterr().err
    assert "another process (process " in error  # rank 0, which holds the lock
    assert "is training in this run directory" in error
    monkeypatch.chdir("/")

    process.send_signal(signal.SIGINT)
    code, errors = finish(process)
    assert code == 128 + signal.SIGINT, errors
    assert "Traceback" not in errors
    left_at = losses(run)[-1][0]
    assert (run / "checkpoints" / f"step-{left_at:08}").is_dir()
    assert f"stopped after step {left_at}, saved" in errors
    assert none_left_in(tmp_path)

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


def test_a_killed_launcher_takes_its_ranks_with_it(run_yaml, tmp_path):
    process = start(slow_run(run_yaml, tmp_path), "--nproc", 2, cwd=tmp_path)
    until_step(process, tmp_path / "runs" / "demo", 2)
    assert len(processes_in(tmp_path)) >= 3
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert none_left_in(tmp_path)


def rank_in(folder: Path, rank: int) -> int:
    """The process of a rank."""
    for process in processes_in(folder):
        proc = Path(f"/proc/{process}")
        environment, parent = (proc / "environ").read_bytes(), (proc / "stat").read_text().rpartition(")")[2].split()[1]
        if f"\0RANK={rank}\0".encode() in environment and b"RANK=" not in Path(f"/proc/{parent}/environ").read_bytes():
            return process
    raise AssertionError(f"no rank {rank}")


def test_a_killed_rank_is_told_in_one_line_and_a_signal_to_any_rank_stops_all(run_yaml, tmp_path, monkeypatch):
    scratch, run = Path(tempfile.mkdtemp()), tmp_path / "runs" / "demo"
    monkeypatch.setenv("TMPDIR", str(scratch))
    file = slow_run(run_yaml, tmp_path)
    arguments = (file, "checkpoint.every=3", "--nproc", 2)
    process = start(*arguments, cwd=tmp_path)
    until_step(process, run, 4)
    victim = rank_in(tmp_path, 1)
    os.kill(victim, signal.SIGKILL)
    code, errors = finish(process)
    saved = int(max((run / "checkpoints").glob("step-*")).name[5:])
    assert code == 3
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith(f"rank 1 (process {victim}) was killed by SIGKILL")
    assert f"the same command resumes from the last checkpoint, of step {saved};" in errors.splitlines()[-1]
    assert "Traceback" in (run / "logs" / "rank-00000.log").read_text()
    assert none_left_in(tmp_path)

    process = start(*arguments, cwd=tmp_path)
    until_step(process, run, saved + 5)
    os.kill(rank_in(tmp_path, 1), signal.SIGTERM)
    code, errors = finish(process)
    assert code == 128 + signal.SIGTERM, errors
    left_at = losses(run)[-1][0]
    assert f"stopped after step {left_at}, saved" in errors
    assert "signal" not in errors  # torch's own words
    assert (run / "checkpoints" / f"step-{left_at:08}").is_dir()
    assert none_left_in(tmp_path)
    assert not [path.name for path in scratch.iterdir() if "elastic" in path.name or "weft" in path.name]
    shutil.rmtree(scratch)


def test_a_mistake_that_only_ranks_can_see_is_one_line(run_yaml, tmp_path):
    in_the_way = tmp_path / "a_file"
    in_the_way.write_text("")
    process = start(run_yaml(run={"directory": str(in_the_way)}, log=QUIET), "--nproc", 2, cwd=tmp_path)
    code, errors = finish(process)
    assert code == 2
    (line,) = errors.strip().splitlines()
    assert "the run directory cannot be created" in line
    assert "set run.directory" in line
    assert str(in_the_way) in line


def test_a_mistake_in_the_file_is_told_before_any_rank_starts(run_yaml, tmp_path):
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


def test_a_launcher_leaves_its_own_environment_as_it_was(run_yaml, tmp_path, monkeypatch):
    """What the same process starts afterwards is not a rank of this launcher, nor ends as one."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    assert (
        main(["train", str(run_yaml(training={"steps": 1}, schedule={"warmup_steps": 0}, log=QUIET)), "--nproc", "2"])
        == 0
    )
    assert dict(os.environ) == before


def test_ranks_with_another_mesh_and_other_data_end_at_once(run_yaml, tmp_path, tiny_heldout, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    file, ranks = run_yaml(parallel={"dp_shard": 2}, log=QUIET), []
    for rank, changes in enumerate([[], ["parallel.dp_shard=1", "parallel.tp=2", f"data.train={tiny_heldout}"]]):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        ranks.append(start(file, *changes, cwd=tmp_path))
    (first, line), second = map(finish, ranks)
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
    code, errors = finish(start(file, "parallel.cp=2", "--nproc", 2, cwd=tmp_path))
    assert code == 2
    (line,) = [line for line in errors.splitlines() if "Rows[17] raised KeyError: 'seventeen'" in line]
    assert "rows_for_launch.py:8: " in line
