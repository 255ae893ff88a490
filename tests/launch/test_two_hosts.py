"""Two hosts train one run together (`two_hosts.py`)."""

import json
import os

import pytest
from running import QUIET, assert_same_weights, losses, train
from two_hosts import finish, namespaces, start, torchrun


def interfaces():
    return sorted(os.listdir("/sys/class/net"))


@pytest.mark.parametrize(
    ("each", "mesh", "forks"),
    [(1, {"dp_shard": 2}, True), pytest.param(2, {"dp_shard": 2, "tp": 2}, False, marks=pytest.mark.long)],
)
def test_two_hosts_train_together(run_yaml, tmp_path, each, mesh, forks):
    unshare, present = namespaces(), interfaces()
    sections = {
        "training": {"steps": 2, "batch_tokens": 512, "micro_batch_size": 2, "dtype": "float64"},
        "schedule": {"warmup_steps": 0},
        "log": QUIET,
    }
    two = run_yaml("two.yaml", run={"name": "two"}, parallel=mesh, **sections)
    process = start(unshare, torchrun(two, processes=each), tmp_path, forks=forks)
    alone = run_yaml("alone.yaml", run={"name": "alone"}, **sections)
    assert train(alone) == 0
    finish(process, tmp_path, 180)

    runs = tmp_path / "runs"
    for mine, theirs in zip(losses(runs / "alone"), losses(runs / "two"), strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-9)
    assert_same_weights(runs / "alone", runs / "two", within=1e-9)
    (cable,) = json.loads((tmp_path / "here.json").read_bytes())
    assert all(cable["stats64"][way]["bytes"] > 1e6 for way in ("rx", "tx")), cable["stats64"]
    assert interfaces() == present
