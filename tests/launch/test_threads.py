"""What Weft says to OpenMP before torch loads, and that the user's own words win."""

from __future__ import annotations

import os

import pytest

from weft.launch.threads import wait_briefly

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
