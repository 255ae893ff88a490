"""`--nodes MIN:MAX`: the run goes on with fewer hosts after one is lost, and with more when one returns."""

import json
import os
import signal

import pytest
from elastic_hosts import STEPS, meshes, sections, until
from running import losses, metrics, train, until_step

from weft.observe.manifest import read_manifest

pytestmark = pytest.mark.chaos


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
    third = hosts(file)
    until(lambda: len(meshes(run)) == 3)
    until_step(first, run, metrics(run)[-1]["step"] + 4, 90)
    third.terminate()  # leaves; the others go on
    assert third.wait(timeout=60) == 143, (tmp_path / "host-2.txt").read_text()
    assert first.wait(timeout=150) == 0, (tmp_path / "host-0.txt").read_text()
    assert meshes(run) == [2, 1, 2, 1]
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
    assert "--rendezvous 127.0.0.1:" in read_manifest(tmp_path / "runs" / "demo")["command"]
    assert [step for step, *_ in losses(tmp_path / "runs" / "demo")] == [1]
