"""Ranks find one another, say whom they wait for, and compare what they run before anything is built."""

import io
import multiprocessing
import os
import socket
import sys
import time

import pytest
import torch

from weft.errors import UserError
from weft.observe.console import Console
from weft.parallel import rendezvous, same_run
from weft.parallel.same_run import compare_ranks
from weft.parallel.world import local_device

SAME = {"optimizer.lr": "0.001", "run.seed": "7", "version of torch": "2.13.0"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def rank_process(answers, done, rank, facts, delay, grace, environment):
    os.environ.update({"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", **environment})
    rendezvous.PATIENCE, rendezvous.OWN_NAME, same_run.GRACE = 0.5, 1, grace
    sys.stderr = said = io.StringIO()
    time.sleep(delay)
    text, quiet = None, None
    try:
        compare_ranks(lambda: facts)
    except UserError as error:
        text, quiet = str(error), error.quiet
    answers.put((rank, text, quiet, said.getvalue()))
    done.wait(60)  # rank 0 holds the store


def compared(facts, *, delays=(0, 0, 0), grace=20, **different):
    """Ranks with these facts, each in a process; rank -> error, whether another prints it, what it wrote on stderr."""
    context = multiprocessing.get_context("fork")
    answers, done = context.Queue(), context.Event()
    common = {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(facts))}
    processes = []
    for rank, mine in enumerate(facts):
        environment = common | different.get(f"rank_{rank}", {})
        arguments = (answers, done, rank, mine, delays[rank], grace, environment)
        processes.append(context.Process(target=rank_process, args=arguments, daemon=True))
        processes[-1].start()
    found = dict(sorted((rank, rest) for rank, *rest in (answers.get(timeout=60) for _ in facts)))
    done.set()
    for process in processes:
        process.join(timeout=20)
    return found


def test_ranks_that_run_the_same_go_on():
    assert compared([SAME, dict(reversed(SAME.items()))]) == {0: [None, None, ""], 1: [None, None, ""]}


def test_a_difference_is_one_line_that_names_ranks_and_keys_with_both_values():
    other = SAME | {"optimizer.lr": "0.002", "data.train": "digest 0a1b"}
    found = compared([SAME, other, other])
    line = (
        "ranks 1, 2 differ from rank 0: optimizer.lr 0.002 (rank 0: 0.001), data.train digest 0a1b "
        "(rank 0: not set); start all ranks with the same run file, overrides, versions and data"
    )
    assert found == {0: [line, False, ""], 1: [line, True, ""], 2: [line, True, ""]}


def test_ranks_that_differ_in_many_ways_are_counted():
    many = {f"key{number}": "x" * 100 for number in range(9)}
    text, _, _ = compared([SAME, SAME | many, SAME | {"run.seed": "8"}])[0]
    assert "rank 1 differs from rank 0" in text
    assert f"key0 {'x' * 57}... (rank 0: not set)" in text
    assert "and 5 more; rank 2 differs too" in text
    assert len(text) < 700


@pytest.mark.parametrize("sizes", [("2", "4"), ("4", "2"), ("1", "2")])
def test_ranks_that_count_on_another_number_of_ranks(sizes):
    ranks = {f"rank_{rank}": {"WORLD_SIZE": size} for rank, size in enumerate(sizes)}
    found = compared([SAME, SAME], grace=1, **ranks)
    text, quiet, _ = found[1]
    assert quiet == (found[0][0] is not None)  # one of them prints it
    assert f"rank 1 differs from rank 0: WORLD_SIZE {sizes[1]} (rank 0: {sizes[0]});" in text


def test_a_rank_beyond_the_number_that_the_first_counts_on_is_named():
    ranks = {"rank_0": {"WORLD_SIZE": "2"}, "rank_1": {"RANK": "3", "WORLD_SIZE": "4"}}
    found = compared([SAME, SAME], grace=1, **ranks)
    assert found[0][0].startswith("rank 3 differs from rank 0: WORLD_SIZE 4 (rank 0: 2);")
    assert found[1] == [found[0][0], True, ""]


def test_who_is_waited_for_is_said_after_a_while():
    found = compared([SAME, SAME, SAME], delays=(0, 0, 1.5))
    (line,) = found[0][2].splitlines()
    assert line.startswith("waiting for rank 2 at 127.0.0.1:")
    assert "(MASTER_ADDR, MASTER_PORT); 2 of 3 ranks have started (" in line
    assert [text for text, *_ in found.values()] == [None] * 3
    found = compared([SAME, SAME], delays=(1.5, 0))
    (line,) = found[1][2].splitlines()
    assert line.startswith("waiting for rank 0 at 127.0.0.1:")
    assert "(MASTER_ADDR, MASTER_PORT): Connection refused" in line


def test_an_address_that_is_none():
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        (text, *_) = compared([SAME], rank_0={"MASTER_PORT": port})[0]
    assert text.startswith(f"MASTER_PORT {port}: rank 0 cannot listen there: Address already in use; ")
    (text, *_) = compared([SAME], rank_0={"MASTER_ADDR": "192.0.2.1"})[0]  # of nobody
    assert text.startswith("rank 0 cannot connect to itself at 192.0.2.1:")


def test_an_address_that_is_known_some_time_later(monkeypatch):
    """As where a cluster starts processes before it tells their names."""
    connect, failures = socket.create_connection, [socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 3

    def late(address, **settings):
        if failures:
            raise failures.pop()
        return connect(address, **settings)

    monkeypatch.setattr(socket, "create_connection", late)  # in the ranks too: they are forks
    assert compared([SAME, SAME]) == {0: [None, None, ""], 1: [None, None, ""]}


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_an_accelerator_that_is_not_supported_is_named_and_the_cpu_is_used(monkeypatch, capsys, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    assert local_device(Console()) == torch.device("cpu")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"this machine's {kind.upper()} device is not supported; the run uses the CPU"
