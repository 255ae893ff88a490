"""Where ranks find one another."""

from __future__ import annotations

import itertools
import os
import socket
import time
from datetime import timedelta
from functools import cache
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

# Ranks may wait for one another while one of them writes a checkpoint or compiles; nobody tokenizes inside a run.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def next_store() -> dist.Store:
    """A store that nothing has been written to, the same on all ranks: a process may train more than once."""
    number = next(_times)
    return dist.PrefixStore(f"weft-{number}", _store())


_times = itertools.count()


@cache
def _store() -> dist.Store:
    """Where the ranks find one another: at the address that torchrun's environment names, or by what is told there.

    torchrun's own store outlives a restart of the ranks (`--max-restarts`), with the addresses of those that are gone;
    and how often they were started, the machines count each for itself. So the first rank opens one that is new.
    """
    store, rank, _ = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    host = os.environ["MASTER_ADDR"]
    if rank == 0:
        name = uuid4().hex
        new = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)
        new.set(name, "")
        store.set("weft-store", f"{new.port} {name}")
        return new
    end = time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
    while time.monotonic() < end:
        port, name = store.get("weft-store").decode().split()
        try:
            socket.create_connection((host, int(port)), timeout=5).close()  # PyTorch would warn of one that is gone
            new = dist.TCPStore(host, int(port), is_master=False, timeout=COLLECTIVE_TIMEOUT)
            if new.check([name]):
                return new
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"the first rank was not found at {host} within {COLLECTIVE_TIMEOUT}")
