"""At start, all ranks compare what they run: config, versions and data. A difference ends all of them at once.

Without it a rank with another learning rate trains to the end, and one with another mesh waits for a process group
that nobody else makes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from weft.errors import UserError
from weft.parallel.rendezvous import attempts, next_store

NAMED = 4  # keys in the message; the others are counted
SHOWN = 60  # characters of a value
GRACE = 2.0  # seconds for the other ranks to report, once one has found a difference


def compare_ranks(facts: Callable[[], Mapping[str, str]]) -> None:
    """Compare this rank's facts with the first rank's. All ranks call it, before they make process groups.

    Each rank reads one entry and writes one: nothing grows with the square of the number of ranks. A single process,
    and one whose process group somebody else made, compare nothing.

    Args:
        facts: makes key -> value, both as they are shown.

    Raises:
        UserError: on all ranks, of which the first one prints it: which ranks differ, and in what.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))
    store, mine = next_store(), {"WORLD_SIZE": str(ranks), **facts()}
    try:
        answer, printed = (_collect(store, ranks, mine), False) if rank == 0 else _report(store, rank, mine)
    except (dist.DistStoreError, dist.DistNetworkError, ConnectionError) as error:
        raise UserError(f"rank 0 is gone, and what it printed says why ({str(error).partition(chr(10))[0]})") from None
    if answer:
        mistake = UserError(answer)
        mistake.quiet = printed
        raise mistake


def _report(store: Store, rank: int, facts: dict[str, str]) -> tuple[str, bool]:
    """Any other rank: write what differs from the first rank's facts, as `key -> (mine, the first's)`.

    Returns:
        What the first rank makes of all reports: what to raise, or nothing; and whether the first rank prints it.
    """
    for _ in attempts(lambda: "rank 0's config", speaks=False):
        if store.check(["digest"]):
            break
    different: dict[str, list[str | None]] = {}
    if store.get("digest").decode() != _digest(facts):
        first = json.loads(store.get("facts"))
        keys = [key for key in {**first, **facts} if first.get(key) != facts.get(key)]
        different = {key: [facts.get(key), first.get(key)] for key in keys}
    store.set(f"report/{rank}", json.dumps(different))
    store.set(f"reporter/{store.add('reporters', 1)}", str(rank))  # which ranks there are, no rank knows for sure
    if different:
        store.add("different", 1)
    store.add("reports", 1)
    for _ in attempts(lambda: "the other ranks", speaks=False):
        if store.check(["answer"]):
            break
    answer = store.get("answer").decode().removeprefix("-")
    store.add("read", 1)
    if different and not answer:  # rank 0 counts on fewer ranks, and has gone on
        return _describe({rank: different}), False
    return answer, True


def _collect(store: Store, ranks: int, facts: dict[str, str]) -> str:
    """The first rank: publish the facts, wait for the others' reports, publish and return the answer."""
    store.set("facts", json.dumps(facts))
    store.set("digest", _digest(facts))

    def here() -> list[int]:
        names = [f"reporter/{number + 1}" for number in range(store.add("reporters", 0))]
        return sorted({int(store.get(name)) for name in names if store.check([name])})

    def missing() -> str:
        present = here()
        absent = numbers([rank for rank in range(1, ranks) if rank not in present])
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f"rank{absent} at {place} (MASTER_ADDR, MASTER_PORT); {len(present) + 1} of {ranks} ranks are here"

    found_at: float | None = None
    for _ in attempts(missing, speaks=True):
        if store.add("reports", 0) >= ranks - 1:
            break
        if store.add("different", 0):
            found_at = found_at or time.monotonic()
            if time.monotonic() - found_at > GRACE:
                break
    answer = ""
    if store.add("different", 0):
        answer = _describe({rank: json.loads(store.get(f"report/{rank}")) for rank in here()})
    store.set("answer", answer or "-")
    end = time.monotonic() + GRACE
    while answer and store.add("read", 0) < store.add("reports", 0) and time.monotonic() < end:
        time.sleep(0.02)  # the store ends with this process
    return answer


def _digest(facts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _describe(reports: dict[int, dict[str, list[str | None]]]) -> str:
    """One line of the ranks that differ in the same way as the first that does; the others are counted."""
    different = {rank: report for rank, report in reports.items() if report}
    shown = next(iter(different.values()))
    alike = [rank for rank, report in different.items() if report == shown]
    others = [rank for rank in different if rank not in alike]
    parts = [f"{key} {_short(mine)} (rank 0: {_short(first)})" for key, (mine, first) in shown.items()]
    if len(parts) > NAMED:
        parts[NAMED:] = [f"and {len(parts) - NAMED} more"]
    also = f"; rank{numbers(others)} differ{'s' * (len(others) == 1)} too" if others else ""
    runs = "runs" if len(alike) == 1 else "run"
    return (
        f"rank{numbers(alike)} {runs} something else than rank 0: {', '.join(parts)}{also}; start all ranks with the "
        "same run file, overrides, versions and data"
    )


def _short(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= SHOWN else f"{value[: SHOWN - 3]}..."


def numbers(ranks: list[int]) -> str:
    """` 3`, or `s 1, 2, 5`: to follow the word `rank`. Of many, the first few."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'s' * (len(ranks) != 1)} {shown}"
