"""The tests' own pool of ranks: who fails is told, who hangs is found, and nobody stays behind."""

import json
import os
import signal
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
    return os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), os.getpid()


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("one too many")
    time.sleep(60)


def die_on_rank_0():
    if os.environ["RANK"] == "0":
        os.abort()


def test_processes_are_used_again(pool):
    two, three = pool.call(rank, 2), pool.call(rank, 3)
    assert [(number, size) for number, size, _ in three] == [("0", "3"), ("1", "3"), ("2", "3")]
    assert [pid for *_, pid in two] == [pid for *_, pid in three[:2]]
    assert pool.call(rank, 1)[0][:2] == (None, None)


def test_a_failure_is_told_with_where_the_others_are(pool):
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: .*ValueError: one too many.*rank 0: was still here:.*fail_on_"):
        pool.call(fail_on_rank_1, 2)
    with pytest.raises(RanksFailed, match=r"rank 0: died with exit code -6"):
        pool.call(die_on_rank_0, 2)
    assert len(pool.call(rank, 2)) == 2


def test_nobody_outlives_a_killed_session():
    code = "import pool, test_pool as t; p = pool.Pool(); print([r[2] for r in p.call(t.rank, 2)], flush=True); input()"
    session = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    workers = [psutil.Process(pid) for pid in json.loads(session.stdout.readline())]
    servers = {worker.parent() for worker in workers}
    assert len(workers) == 2
    session.send_signal(signal.SIGKILL)
    session.communicate()
    _, alive = psutil.wait_procs([*workers, *servers], timeout=10)
    assert not alive
