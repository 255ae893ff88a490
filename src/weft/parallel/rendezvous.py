"""Where ranks find one another: a TCPStore of the first rank, and who is waited for, when that takes long."""

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

# Ranks may wait for one another while one of them writes a checkpoint or compiles; nobody tokenizes inside a run.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
PATIENCE = 5.0  # seconds until a rank that waits says what for
REMINDER = 60.0  # seconds until it says so again
OWN_NAME = 60.0  # seconds for the first rank's name to be known: a cluster may start its processes before its names


def next_store() -> Store:
    """A store that nothing has been written to, the same on all ranks: a process may train more than once.

    Raises:
        UserError: the address is not to be had, or nobody answers there.
    """
    number = next(_times)
    return PrefixStore(f"weft-{number}", _store())


_times = itertools.count()


def attempts(missing: Callable[[], str], *, speaks: bool) -> Iterator[None]:
    """Yield, ever more slowly, until what the caller waits for is there.

    Args:
        missing: what that is; printed after a few seconds if this rank `speaks`.

    Raises:
        UserError: it took longer than a collective may take.
    """
    began, pause, told = time.monotonic(), 0.002, 0.0
    while (waited := time.monotonic() - began) < COLLECTIVE_TIMEOUT.total_seconds():
        yield
        if waited > PATIENCE and (not told or waited - told > REMINDER):
            Console(speaks).line(f"waiting for {missing()} ({waited:.0f} s)")
            told = waited
        time.sleep(pause)
        pause = min(1.4 * pause, 0.25)
    raise UserError(f"waited {COLLECTIVE_TIMEOUT} for {missing()}; mend that and start all ranks again")


@cache
def _store() -> Store:
    """A store at the address that torchrun's environment names, or at one that is told there.

    torchrun's own store outlives a restart of the ranks (`--max-restarts`), with the addresses of those that are gone;
    and how often they were started, the machines count each for itself. So the first rank opens one that is new.
    """
    rank, host, port = int(os.environ["RANK"]), os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise UserError("RANK is set, and MASTER_ADDR or MASTER_PORT is not; start the ranks by torchrun, or set them")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _serve(host, int(port))[0] if rank == 0 else _connect(host, int(port))
    agent = _connect(host, int(port))
    if rank == 0:
        (store, number), name = _serve(host, 0), uuid4().hex
        store.set(name, "")
        agent.set("weft-store", f"{number} {name}")
        return store
    place = f"{host}:{port}"
    for _ in attempts(lambda: f"rank 0 to open its store (torchrun's is at {place})", speaks=_speaks()):
        if agent.check(["weft-store"]):
            number, name = agent.get("weft-store").decode().split()
            store = _try_to_connect(host, int(number))
            if store is not None and store.check([name]):
                return store
    raise AssertionError("attempts() ends by an exception")


def _serve(host: str, port: int) -> tuple[Store, int]:
    """The first rank's own store, and its port (0: any that is free).

    The socket is opened here: PyTorch would retry a wrong address for minutes.
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
            raise UserError(f"MASTER_PORT {port}: {what}; choose one that is free on this machine") from None
    with socket.socket(fileno=os.dup(handle)) as listener:
        port = listener.getsockname()[1]
    why, end = ["no answer"], time.monotonic() + OWN_NAME

    def missing() -> str:
        return f"rank 0 to find itself at {host}:{port} (MASTER_ADDR): {why[0]}"

    for _ in attempts(missing, speaks=True):
        try:
            socket.create_connection((host, port), timeout=PATIENCE).close()
            break
        except OSError as error:
            why[0] = error.strerror or str(error)
            if time.monotonic() > end:
                os.close(handle)
                what = f"this is rank 0, and it does not find itself at {host}:{port} ({why[0]})"
                raise UserError(f"{what}; MASTER_ADDR is to be the address of rank 0's machine") from None
    return _tcp_store(host, port, is_master=True, master_listen_fd=handle), port


def _connect(host: str, port: int) -> Store:
    """The store of another process, when it is there."""
    why = ["no answer"]

    def missing() -> str:
        return f"rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT): {why[0]}"

    for _ in attempts(missing, speaks=_speaks()):
        store = _try_to_connect(host, port, why)
        if store is not None:
            return store
    raise AssertionError("attempts() ends by an exception")


def _try_to_connect(host: str, port: int, why: list[str] | None = None) -> Store | None:
    """A client of the store there; None if there is none, and the reason in `why`.

    PyTorch would warn of a port that nobody listens at, and wait for ever for a server that says nothing: hence the
    first connection, and the thread.
    """
    found: list[Store] = []

    def open_client() -> None:
        with suppress(RuntimeError):
            found.append(_tcp_store(host, port, is_master=False))

    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
        thread = threading.Thread(target=open_client, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        problem = "something else than rank 0 listens there"
    except OSError as error:
        problem = error.strerror or str(error)
    if why is not None:
        why[0] = problem
    return found[0] if found else None


def _tcp_store(host: str, port: int, **settings: Any) -> Store:
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT, **settings
    )


def _speaks() -> bool:
    """One rank on each machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
