"""Two hosts whose cable is cut or slow: the run goes on when the cable is back, with the numbers of one process."""

import json

import pytest
from running import assert_same_weights, losses, train
from two_hosts import finish, namespaces, start, torchrun

pytestmark = pytest.mark.chaos
# Waits until the run has made 12 steps, so that it has a checkpoint.
TWELVE = "until [ $(cat runs/two/metrics.jsonl 2>/dev/null | wc -l) -ge 12 ]; do sleep 0.1; done"
FAULTS = {
    "a cut of 40 seconds": f"{TWELVE}; ip link set here down; sleep 40; ip link set here up",
    "a slow cable": f"{TWELVE}; tc qdisc add dev here root tbf rate 30mbit burst 64kb latency 400ms",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_cable_changes_no_number(run_yaml, tmp_path, fault):
    unshare = namespaces()
    sections = {
        "training": {"steps": 30, "batch_tokens": 512, "micro_batch_size": 2, "dtype": "float64"},
        "log": {"trackers": []},
        "checkpoint": {"every": 5},
    }
    alone = run_yaml("alone.yaml", run={"name": "alone"}, **sections)
    assert train(alone) == 0
    sections["training"]["hang_timeout"] = 15
    two = run_yaml("two.yaml", run={"name": "two"}, parallel={"dp_shard": 2, "tp": 2}, **sections)
    command = torchrun(two, "--max-restarts", "3", "--rdzv-conf", "join_timeout=300,read_timeout=300")
    process = start(unshare, command, tmp_path, FAULTS[fault])
    finish(process, tmp_path, 400)

    runs = tmp_path / "runs"
    for mine, theirs in zip(losses(runs / "alone"), losses(runs / "two"), strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-9)
    assert_same_weights(runs / "alone", runs / "two", within=1e-9)
    if "cut" in fault:
        lines = (runs / "two" / "logs" / "failures.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["step"] >= 10
