"""A kill -9 at every operation on the folders of local checkpoints of two hosts, and the loss of either host."""

import shutil
from pathlib import Path

import on_hosts
import pytest
from kills import spread, wanted
from running import assert_same_weights, losses

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("ranks")]


def test_a_kill_at_any_operation_and_a_lost_host_change_no_number(run_yaml, tmp_path, ranks):
    sections = {
        "training": {"steps": 5, "batch_tokens": 256, "micro_batch_size": 2},
        "schedule": {"warmup_steps": 0},
        "data": {"validation": None},
        "log": {"trackers": []},
        "checkpoint": {"every": 9, "local": {"steps": 1, "directory": "$NODE_DISK"}},
    }
    calm, run = tmp_path / "runs" / "calm", tmp_path / "runs" / "demo"
    disks = [tmp_path / f"disk-{number}" for number in range(2)]
    file = run_yaml("calm.yaml", run={"name": "calm"}, **sections)
    most = min(ranks.call(on_hosts.fit_killed_at, 2, file, disks, 0, 0))
    assert most > 50
    numbers = spread(wanted(), most)
    file, local = run_yaml(**sections), 0
    for turn, number in enumerate(numbers):
        victim, lost = turn % 2, turn // 2 % 3  # 2: no host is lost
        for path in (run, *disks):
            shutil.rmtree(path, ignore_errors=True)
        with pytest.raises(AssertionError, match="died with exit code -9"):
            ranks.call(on_hosts.fit_killed_at, 2, file, disks, victim, number)
        had = [whole(disk) for disk in disks]
        if lost < 2:
            shutil.rmtree(disks[lost], ignore_errors=True)
        said = ranks.call(on_hosts.fit, 2, file, disks)[0]
        case = f"operation {number} of rank {victim}, lost host {lost}: {said}"
        assert losses(run) == losses(calm), case
        assert_same_weights(run, calm)
        assert not [path for disk in disks for path in disk.glob("weft-*/*")], case
        best = max(step for place, steps in enumerate(had) if place != lost for step in steps)
        assert ("resuming from the local checkpoint" in said) == (best > 0), case
        assert best == 0 or f"resumes after step {best}" in " ".join(said.split()), case
        local += best > 0
    assert local >= len(numbers) // 2


def whole(disk: Path) -> set[int]:
    """The steps of the complete checkpoints of a host, which has the files of both; 0: none."""
    return {0, *(int(path.name.removeprefix("step-")) for path in disk.glob("weft-*/*/checkpoints/step-*"))}
