"""The tests' own pool of ranks: who fails is told, who hangs is found, and nobody stays behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pool import Pool, RanksFailed

pytestmark = [pytest.mark.matrix, pytest.mark.xdist_group("pool")]


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def rank():
    return os.environ.get("RANK"), os.environ.get("WORLD_SIZE")


def sleep(folder):
    (folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    time.sleep(300)


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("one too many")
    time.sleep(60)


def die_on_rank_0():
    if os.environ["RANK"] == "0":
        os.abort()


def test_ranks_know_who_they_are(pool):
    assert pool.call(rank, 3) == [("0", "3"), ("1", "3"), ("2", "3")]
    assert pool.call(rank, 1) == [(None, None)]


def test_a_failure_is_reported_with_where_the_others_are(pool):
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: .*ValueError: one too many.*rank 0: was still here:.*fail_on_"):
        pool.call(fail_on_rank_1, 2)
    with pytest.raises(RanksFailed, match=r"rank 0: died with exit code -6"):
        pool.call(die_on_rank_0, 2)
    assert len(pool.call(rank, 2)) == 2


def test_a_rank_that_hangs_is_reported_with_where_it_is(pool, tmp_path):
    with pytest.raises(RanksFailed, match=r"(?s)2 ranks were not done after 2 s\n--- rank 0, 1: .*, line \d+ in sleep"):
        pool.call(sleep, 2, tmp_path, seconds=2)


def test_nobody_outlives_a_killed_session(tmp_path):
    code = "import pathlib, pool, sys, test_pool; pool.Pool().call(test_pool.sleep, 2, pathlib.Path(sys.argv[1]))"
    session = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=Path(__file__).parent)
    end = time.monotonic() + 60
    while len(found := [text for file in tmp_path.glob("*.pid") if (text := file.read_text())]) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    ranks = [psutil.Process(int(pid)) for pid in found]
    processes = {*ranks, *(rank.parent() for rank in ranks)}
    assert len(processes) == 3  # the fork server with them
    session.kill()
    session.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
