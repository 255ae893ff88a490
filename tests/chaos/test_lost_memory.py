"""Hosts that are lost with all local checkpoints in their memory: `checkpoint.local` with copies on peers."""

import json
import os
import shutil
import signal

import pytest
from elastic_hosts import meshes, sections, until
from running import assert_same_weights, losses, metrics, train, until_step

pytestmark = pytest.mark.chaos
LOCAL = {"every": 1000, "local": {"steps": 1, "directory": "$NODE_MEMORY"}}
KILLED = (5, 11, 22, 40)  # steps


@pytest.fixture
def host(hosts, tmp_path, monkeypatch):
    """Starts a host with a new, empty memory, which is a folder."""

    def start(file, name, nodes):
        memory = tmp_path / name
        memory.mkdir()
        monkeypatch.setenv("NODE_MEMORY", str(memory))
        return hosts(file, "--max-restarts", "20", nodes=nodes), memory

    return start


def lose(process, memory):
    os.kill(process.pid, signal.SIGKILL)  # its rank dies with it
    process.wait()
    shutil.rmtree(memory)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_lost_host_is_replaced_and_no_number_changes(run_yaml, tmp_path, host, monkeypatch, mode):
    """Four times, a host is killed, its memory is gone, and another one takes its place. No checkpoint is durable."""
    parallel = {"parallel": {"dp_replicate": 1, "dp_shard": 2}, "checkpoint": LOCAL | {"mode": mode}}
    calm = run_yaml("calm.yaml", run={"name": "calm"}, **sections(**parallel | {"checkpoint": {"every": 1000}}))
    monkeypatch.chdir(tmp_path)
    assert train(calm, "--nproc", 2) == 0
    file, run = run_yaml(**sections(seconds=0.1, **parallel)), tmp_path / "runs" / "demo"
    first, _ = host(file, "memory-0", "2")
    until(lambda: "waiting for 2 hosts" in (tmp_path / "host-0.txt").read_text())
    for number, step in enumerate(KILLED, start=1):
        other, memory = host(file, f"memory-{number}", "2")
        until_step(first, run, step, 120)
        lose(other, memory)
    last, _ = host(file, "memory-5", "2")
    assert first.wait(timeout=150) == 0, (tmp_path / "host-0.txt").read_text()
    assert last.wait(timeout=30) == 0
    assert losses(run) == losses(tmp_path / "runs" / "calm")
    assert_same_weights(run, tmp_path / "runs" / "calm")
    said = "".join(file.read_text() for file in tmp_path.glob("host-*.txt"))
    assert said.count("resuming from the local checkpoint") == 4, said
    sessions = json.loads((run / "manifest.json").read_text())["sessions"]
    began = [session["step"] for session in sessions]
    lost = [step - resumed for step, resumed in zip(KILLED, began[1:], strict=True)]
    assert max(lost) <= 4, began  # at most two saves are on their way, beside the training
    assert not list(tmp_path.glob("memory-*/weft-*/*"))


def test_the_other_hosts_go_on_from_their_memory(run_yaml, tmp_path, host, monkeypatch):
    """Two of three hosts are left, with a mesh of two ranks; they have all files of three."""
    file = run_yaml(**sections(seconds=0.2, parallel={"dp_replicate": 1, "dp_shard": 3}, checkpoint=LOCAL))
    run = tmp_path / "runs" / "demo"
    first, _ = host(file, "memory-0", "2:3")
    until(lambda: "waiting for 2 hosts" in (tmp_path / "host-0.txt").read_text())
    others = [host(file, f"memory-{number}", "2:3") for number in (1, 2)]
    until_step(first, run, 9, 120)
    assert meshes(run) == [1]
    began = metrics(run)[-1]["step"]
    lose(*others[0])
    until_step(first, run, began + 8, 120)
    assert first.wait(timeout=150) == 0, (tmp_path / "host-0.txt").read_text()
    said = (tmp_path / "host-0.txt").read_text()
    assert "resuming from the local checkpoint" in said
    sessions = json.loads((run / "manifest.json").read_text())["sessions"]
    assert [session["mesh"]["dp_shard"] for session in sessions] == [3, 2]
    assert sessions[1]["step"] >= began - 1
    alone = run_yaml("alone.yaml", run={"name": "alone"}, **sections(parallel={"dp_replicate": 1}))
    monkeypatch.chdir(tmp_path)
    assert train(alone) == 0
    for mine, theirs in zip(metrics(run), metrics(tmp_path / "runs" / "alone"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0, abs=1e-9)
