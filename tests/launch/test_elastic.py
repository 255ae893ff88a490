"""`--nodes MIN:MAX`: the run goes on with fewer hosts after one is lost, and with more when one returns."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from running import QUIET, SLOW, losses, metrics, train, until_step

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


@pytest.mark.chaos
def test_a_lost_host_shrinks_the_mesh_and_a_returning_one_grows_it(run_yaml, tmp_path, hosts, monkeypatch):
    file = run_yaml(**sections(seconds=0.5))
    run = tmp_path / "runs" / "demo"
    first = hosts(file)
    until(lambda: "waiting for 1 host" in (tmp_path / "host-0.txt").read_text())
    second = hosts(file)
    until_step(first, run, 7, 90)
    assert meshes(run) == [2]
    os.kill(second.pid, signal.SIGKILL)  # its rank dies with it
    until_step(first, run, 14, 90)
    assert meshes(run) == [2, 1]
    hosts(file)
    assert first.wait(timeout=150) == 0, (tmp_path / "host-0.txt").read_text()
    assert meshes(run) == [2, 1, 2]
    said = (tmp_path / "host-0.txt").read_text()
    assert "hosts: 1, mesh: one rank (nearest legal to the configured one)" in said
    assert "hosts: 2, mesh: dp_replicate 2" in said
    (failure,) = [json.loads(line) for line in (run / "logs" / "failures.jsonl").read_text().splitlines()]
    assert failure["lost_steps"] <= 5

    monkeypatch.chdir(tmp_path)
    alone = run_yaml("alone.yaml", run={"name": "alone"}, **sections(parallel={"dp_replicate": 1}))
    assert train(alone) == 0
    pairs = list(zip(metrics(run), metrics(tmp_path / "runs" / "alone"), strict=True))
    assert [mine["step"] for mine, _ in pairs] == list(range(1, STEPS + 1))
    for mine, theirs in pairs:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0, abs=1e-9)
        assert mine["tokens"] == theirs["tokens"]


def test_a_fixed_number_of_hosts_and_a_mistake_that_no_restart_mends(run_yaml, tmp_path, hosts):
    (tmp_path / "breaks.py").write_text(
        "class Breaks:\n    def step(self, state):\n        if state.step == 2: raise ValueError('my mistake')\n"
    )
    file = run_yaml(**sections(callbacks=[{"type": "breaks:Breaks"}]))
    both = [hosts(file, "--max-restarts", "3", nodes="2") for _ in range(2)]
    codes = [process.wait(timeout=90) for process in both]
    said = [(tmp_path / f"host-{number}.txt").read_text() for number in range(2)]
    assert 2 in codes, said
    assert all(codes), said
    assert any("my mistake" in text for text in said)
    assert len(meshes(tmp_path / "runs" / "demo")) == 1
    assert [step for step, *_ in losses(tmp_path / "runs" / "demo")] == [1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nodes", "2"], "--nodes and --rendezvous belong together"),
        (["--rendezvous", "one:29400"], "--nodes and --rendezvous belong together"),
        (["--nodes", "3:2", "--rendezvous", "one:29400"], "--nodes 3:2: use a number of hosts, or MIN:MAX"),
        (["--nodes", "2", "--rendezvous", "one"], "--rendezvous one: use HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "one:29400", "--fresh"], "--fresh: each host would start over"),
    ],
)
def test_wrong_options_are_refused(run_yaml, capsys, arguments, text):
    assert train(run_yaml(), *arguments) == 2
    assert text in capsys.readouterr().err
