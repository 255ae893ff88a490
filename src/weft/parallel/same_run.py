"""Compares config, versions and data of all ranks at startup. All ranks fail if one rank differs.

Without this check, a rank with a different learning rate would train on, and a rank with a different mesh would wait
for a process group forever.
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
from weft.formatting import first_few
from weft.parallel.rendezvous import attempts, next_store

NAMED = 4  # keys in the message; further keys are only counted
SHOWN = 60  # characters of a value in the message
GRACE = 2.0  # seconds that rank 0 waits for further reports after the first difference


def compare_ranks(facts: Callable[[], Mapping[str, str]]) -> None:
    """Checks that facts about the run, such as config values and versions, are equal on all ranks.

    All ranks must call this function before they create process groups.

    Each rank reads and writes a constant number of store entries, so the cost is linear in the number of ranks. Does
    nothing if the environment has no RANK (a single process), or if a process group is already initialized.

    Args:
        facts: function that returns name of a fact -> value. Error messages show these names, and the values up to
            `SHOWN` characters.

    Raises:
        UserError: on all ranks, if the facts of any rank differ from rank 0's. The message names the ranks and the
            facts. Only rank 0 prints it. Also raised if rank 0 has exited, or a rank does not start in time.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))
    store, mine = next_store(), {"WORLD_SIZE": str(ranks), **facts()}
    try:
        answer, printed = (_collect(store, ranks, mine), False) if rank == 0 else _report(store, rank, mine)
    except (dist.DistStoreError, dist.DistNetworkError, ConnectionError) as error:
        raise UserError(
            f"rank 0 has exited (here: {str(error).partition(chr(10))[0]}); see the last message of rank 0"
        ) from None
    if answer:
        error = UserError(answer)
        error.quiet = printed
        raise error


def _report(store: Store, rank: int, facts: dict[str, str]) -> tuple[str, bool]:
    """Reports to the store which of this rank's facts differ from rank 0's. Ranks other than 0 call this function.

    Returns:
        (error message, whether rank 0 prints this message). The message lists all ranks that differ; "" if none does.
    """
    for _ in attempts(lambda: "rank 0's config", prints=False):
        if store.check(["digest"]):
            break
    different: dict[str, list[str | None]] = {}  # key -> [this rank's value, rank 0's value]
    if store.get("digest").decode() != _digest(facts):
        first = json.loads(store.get("facts"))
        keys = [key for key in {**first, **facts} if first.get(key) != facts.get(key)]
        different = {key: [facts.get(key), first.get(key)] for key in keys}
    store.set(f"report/{rank}", json.dumps(different))
    store.set(f"reporter/{store.add('reporters', 1)}", str(rank))  # ranks may differ in WORLD_SIZE
    if different:
        store.add("different", 1)
    store.add("reports", 1)
    for _ in attempts(lambda: "the other ranks", prints=False):
        if store.check(["answer"]):
            break
    answer = store.get("answer").decode().removeprefix("-")
    store.add("read", 1)
    if different and not answer:  # rank 0 has a smaller WORLD_SIZE, and has started
        return _describe({rank: different}), False
    return answer, True


def _collect(store: Store, ranks: int, facts: dict[str, str]) -> str:
    """Publishes rank 0's facts, waits for the reports of other ranks, and publishes the error message.

    Only rank 0 calls this function.

    Returns:
        The error message, "" if no rank differs.
    """
    store.set("facts", json.dumps(facts))
    store.set("digest", _digest(facts))

    def reporters() -> list[int]:
        names = [f"reporter/{number + 1}" for number in range(store.add("reporters", 0))]
        return sorted({int(store.get(name)) for name in names if store.check([name])})

    def missing() -> str:
        present = reporters()
        absent = rank_list([rank for rank in range(1, ranks) if rank not in present])
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f"rank{absent} at {place} (MASTER_ADDR, MASTER_PORT); {len(present) + 1} of {ranks} ranks have started"

    found_at: float | None = None
    for _ in attempts(missing, prints=True):
        if store.add("reports", 0) >= ranks - 1:
            break
        if store.add("different", 0):
            found_at = found_at or time.monotonic()
            if time.monotonic() - found_at > GRACE:
                break
    answer = ""
    if store.add("different", 0):
        answer = _describe({rank: json.loads(store.get(f"report/{rank}")) for rank in reporters()})
    store.set("answer", answer or "-")
    end = time.monotonic() + GRACE
    while answer and store.add("read", 0) < store.add("reports", 0) and time.monotonic() < end:
        time.sleep(0.02)  # the store ends with this process
    return answer


def _digest(facts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _describe(reports: dict[int, dict[str, list[str | None]]]) -> str:
    """Returns the error message, in one line, for at least one rank that differs.

    The message contains the differences of the first such rank from rank 0, the ranks with exactly these differences,
    and the ranks with other differences.

    Args:
        reports: rank -> name of a fact -> [the rank's value, rank 0's value]. The inner dictionary is empty if the
            rank's facts are equal to rank 0's.
    """
    different = {rank: report for rank, report in reports.items() if report}
    shown = next(iter(different.values()))
    same = [rank for rank, report in different.items() if report == shown]
    others = [rank for rank in different if rank not in same]
    keys = [f"{key} {_short(own)} (rank 0: {_short(first)})" for key, (own, first) in shown.items()]
    if len(keys) > NAMED:
        keys[NAMED:] = [f"and {len(keys) - NAMED} more"]
    also = f"; rank{rank_list(others)} differ{'s' * (len(others) == 1)} too" if others else ""
    runs = "differs" if len(same) == 1 else "differ"
    return (
        f"rank{rank_list(same)} {runs} from rank 0: {', '.join(keys)}{also}; start all ranks with the "
        "same run file, overrides, versions and data"
    )


def _short(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= SHOWN else f"{value[: SHOWN - 3]}..."


def rank_list(ranks: list[int]) -> str:
    """Returns a suffix for the word "rank": ` 3` for one rank, `s 1, 2, 5` for several. Lists at most eight ranks."""
    return f"{'s' * (len(ranks) != 1)} {first_few([*map(str, ranks)], 8)}"
