"""What Weft says to OpenMP before torch loads, that the user's own words win, and how many threads a rank gets."""

from __future__ import annotations

import os

import pytest

from weft.config.training import TrainingSection
from weft.launch.threads import wait_briefly
from weft.processes import usable_cores

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("said", "then"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "infinite"}, {"GOMP_SPINCOUNT": "infinite"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_wait_briefly_unless_the_user_says_otherwise(monkeypatch, said, then):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    # monkeypatch restores what it set; a name that wait_briefly adds is one it must know about too
    monkeypatch.setattr(os, "environ", dict(os.environ))
    wait_briefly()
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == then


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_ranks_share_the_cores_also_where_a_process_has_no_affinity(monkeypatch, local_ranks):
    import torch

    from weft.train.auto_settings import choose

    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    section = TrainingSection(batch_tokens=1, dtype="float32")
    assert choose(section, torch.device("cpu")).threads == 6 // local_ranks
