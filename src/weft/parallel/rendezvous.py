"""Connects the ranks of a run through a TCPStore on rank 0, and reports which ranks are missing."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.errors import UserError
from weft.observe.console import Console
from weft.processes import STORE_SOCKET

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # one rank may write a checkpoint, or compile, while others wait
PATIENCE = 5.0  # seconds until a waiting rank prints which ranks it waits for
REMINDER = 60.0  # seconds until a waiting rank prints the message again
OWN_NAME = 60.0  # seconds for rank 0's host name to resolve: a cluster may start processes before its DNS


def next_store() -> Store:
    """Returns a new store that all ranks share.

    Each call returns a store with another key prefix, because a process can train more than once.

    Raises:
        UserError: if rank 0 cannot listen at MASTER_ADDR and MASTER_PORT, or this rank cannot connect to it.
    """
    return PrefixStore(f"weft-{next(_times)}", _store())


_times = itertools.count()


def attempts(missing: Callable[[], str], *, prints: bool) -> Iterator[None]:
    """Yields at growing intervals. At each yield, the caller checks a condition, and leaves the loop if it is met.

    Args:
        missing: returns a description of what the caller waits for.
        prints: whether to print this description after `PATIENCE` seconds, and every `REMINDER` seconds.

    Raises:
        UserError: the caller has not broken out of the loop within `COLLECTIVE_TIMEOUT`.
    """
    began, pause, printed = time.monotonic(), 0.002, 0.0
    while (waited := time.monotonic() - began) < COLLECTIVE_TIMEOUT.total_seconds():
        yield
        if waited > PATIENCE and (not printed or waited - printed > REMINDER):
            Console(prints).line(f"waiting for {missing()} ({waited:.0f} s)")
            printed = waited
        time.sleep(pause)
        pause = min(1.4 * pause, 0.25)
    raise UserError(f"waited {COLLECTIVE_TIMEOUT} for {missing()}; start every rank, and check the network")


@cache
def _store() -> Store:
    """Returns a client of rank 0's store. Rank 0 opens the store.

    Without torchrun, the store is at MASTER_ADDR and MASTER_PORT. With torchrun, torchrun's own store is at this
    address. The run does not use torchrun's store, which keeps entries of exited ranks after a restart
    (`--max-restarts`). Rank 0 opens a new store, and publishes the new store's port in torchrun's store.
    """
    rank, host, port = int(os.environ["RANK"]), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise UserError("RANK is set without valid MASTER_ADDR and MASTER_PORT; use torchrun, or set both")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _serve(host, int(port))[0] if rank == 0 else _connect(host, int(port))
    agent = _connect(host, int(port))
    if rank == 0:
        (store, number), name = _serve(host, 0), uuid4().hex
        store.set(name, "")
        agent.set("weft-store", f"{number} {name}")
        return store
    place = f"{host}:{port}"
    for _ in attempts(lambda: f"rank 0 to open its store (torchrun: {place})", prints=_prints()):
        if agent.check(["weft-store"]):
            number, name = agent.get("weft-store").decode().split()
            store = _try_to_connect(host, int(number))[0]
            if store is not None and store.check([name]):
                return store
    raise AssertionError("internal error: `attempts` ended without an exception")


def _serve(host: str, port: int) -> tuple[Store, int]:
    """Opens rank 0's store. Returns the store and its port.

    Opens the socket itself, because PyTorch would retry a wrong address for minutes.

    Args:
        port: port to listen on; 0 chooses a free port.
    """
    inherited = os.environ.pop(STORE_SOCKET, None)
    if inherited is not None:
        handle = int(inherited)
    else:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            handle = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=4096).detach()
        except OSError as error:
            what = os.strerror(error.errno or 0)
            raise UserError(f"MASTER_PORT {port}: rank 0 cannot listen there: {what}; set it to a free port") from None
    with socket.socket(fileno=os.dup(handle)) as listener:
        port = listener.getsockname()[1]
    problem, end = "no answer", time.monotonic() + OWN_NAME

    def missing() -> str:
        return f"rank 0 to connect to itself at {host}:{port} (MASTER_ADDR): {problem}"

    for _ in attempts(missing, prints=True):
        try:
            socket.create_connection((host, port), timeout=PATIENCE).close()
            break
        except OSError as error:
            problem = error.strerror or str(error)
            if time.monotonic() > end:
                os.close(handle)
                what = f"rank 0 cannot connect to itself at {host}:{port} ({problem})"
                raise UserError(f"{what}; set MASTER_ADDR to the address of rank 0's machine") from None
    return _tcp_store(host, port, is_master=True, master_listen_fd=handle), port


def _connect(host: str, port: int) -> Store:
    """Waits for the store at an address, and returns a client of the store."""
    problem = "no answer"

    def missing() -> str:
        return f"rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT): {problem}"

    for _ in attempts(missing, prints=_prints()):
        store, problem = _try_to_connect(host, port)
        if store is not None:
            return store
    raise AssertionError("internal error: `attempts` ended without an exception")


def _try_to_connect(host: str, port: int) -> tuple[Store | None, str]:
    """Tries to connect to the store at an address.

    Returns (client, reason). If connecting failed, the client is None and `reason` says why; otherwise `reason` has no
    meaning.

    First opens a plain connection, because PyTorch would print warnings if nothing listens on the port. Creates the
    client in a thread, because PyTorch would wait forever for a server that does not answer.
    """
    found: list[Store] = []

    def open_client() -> None:
        with suppress(RuntimeError):
            found.append(_tcp_store(host, port, is_master=False))

    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        return None, error.strerror or str(error)
    thread = threading.Thread(target=open_client, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return (found[0] if found else None), "another program than rank 0 listens there"


def _tcp_store(host: str, port: int, **settings: Any) -> Store:
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT, **settings
    )


def _prints() -> bool:
    """Whether this rank prints messages: the first rank of each host does."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
