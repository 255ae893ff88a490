"""A process that is a rank may train more than once: nothing is kept of meshes that are gone."""

import math

import pytest
from matrix import Case, write_run
from pool import Pool, fit
from running import metrics

pytestmark = pytest.mark.xdist_group("ranks")


def fit_all(files):
    for file in files:
        fit(file, False)


def test_ranks_train_twice(tmp_path):
    """On another mesh with the same tensor ranks, whose groups have other names by then."""
    pool = Pool()
    meshes = {"first": {"cp": 2, "tp": 2}, "second": {"dp_shard": 2, "tp": 2}}
    cases = {name: Case("tied", "plain", mesh, layers=1, sequences=4) for name, mesh in meshes.items()}
    files = [write_run(tmp_path, case, name=name, steps=2) for name, case in cases.items()]
    try:
        pool.call(fit_all, 4, files, seconds=120)
    finally:
        pool.close()
    first, second = (metrics(tmp_path / name) for name in meshes)
    assert [line["loss"] for line in first] == pytest.approx([line["loss"] for line in second], rel=0, abs=1e-9)
    assert math.isfinite(first[-1]["loss"])
