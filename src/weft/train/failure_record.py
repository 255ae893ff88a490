"""Writes `logs/failures.jsonl`, and the records of ranks from which the next attempt learns how the last one failed.

Weft's launcher sees its ranks fail. Under torchrun, nobody sees all ranks: each rank keeps a file
`logs/ranks/00000.json`, and deletes it when it ends well. The first rank of the next attempt finds what is left.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.checkpoint.checkpoint_files import FOLDER as CHECKPOINTS
from weft.checkpoint.checkpoint_files import list_checkpoints, step_of
from weft.checkpoint.local_record import recorded
from weft.errors import UserError
from weft.observe import status
from weft.observe.manifest import local_time

FILE = "failures.jsonl"
RANKS = "ranks"
AGENTS = "torchrun-agents"
RUN_ID = "TORCHELASTIC_RUN_ID"  # environment variable: torchrun's id of the job
LINES = 20  # last lines of an error, or of a rank's stderr, that the record of a failure has


def last_checkpoint(run: Path) -> tuple[int, float]:
    """Returns step and time (seconds since 1970) of the last checkpoint of a run; zeros without a checkpoint.

    Local checkpoints count, as far as this host has them.
    """
    saved = list_checkpoints(run / CHECKPOINTS)[-1:]
    with suppress(UserError):  # the run itself reports a damaged record
        local = recorded(run)
        saved += local.checkpoints()[-1:] if local is not None else []
    found = []
    for path in saved:
        with suppress(OSError):  # deleted meanwhile
            found.append((step_of(path) or 0, path.stat().st_mtime))
    return max(found, default=(0, 0.0))


def append_failure(run: Path, *, began: float, at: float, step: int, **failure: Any) -> None:
    """Appends a line to `logs/failures.jsonl`. If that is not possible, prints the reason.

    Args:
        began: time at which the failed attempt began, in seconds since 1970.
        at: time of the failure, in seconds since 1970.
        step: the step in which the attempt failed; 0 before the first step.
        failure: attempt, rank, host, hang, exit_code, signal, doing, stderr, restarted.
    """
    saved, saved_at = last_checkpoint(run)
    entry = {
        "time": local_time(at),
        **failure,
        "step": step or None,
        "lost_seconds": round(max(0.0, at - max(saved_at, began)), 3),
        "lost_steps": max(0, step - 1 - saved),
    }
    path = run / "logs" / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        what = f"the failure cannot be recorded: {error.strerror}; free space or set run.directory"
        print(f"{path}: {what}", file=sys.stderr, flush=True)


def stacks_file(run: Path, attempt: int) -> Path:
    """Returns the file in which the Python stacks of all ranks are written if one of them hangs."""
    return run / "logs" / f"stacks-{attempt}.txt"


def collectives_file(run: Path, attempt: int, rank: int) -> Path:
    """Returns the file in which a rank that hangs writes its last collectives."""
    return run / "logs" / f"collectives-{attempt}-rank-{rank}.json"


def waits_for_other_ranks(run: Path, attempt: int, rank: int) -> bool:
    """Whether a rank that makes no progress waits in a collective. If so, it is not the cause of the hang."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        recorded = json.loads(collectives_file(run, attempt, rank).read_text(encoding="utf-8"))
        return not all(entry["retired"] for entry in recorded["entries"])
    return False


class RankRecord:
    """The record of a rank under torchrun: a file, which exists until the rank ends well."""

    def __init__(self, run: Path, rank: int, number: int):
        self.path = run / "logs" / RANKS / f"{rank:05d}.json"
        self.content: dict[str, Any] = {
            "rank": rank,
            "host": socket.gethostname(),
            "attempt": number,
            "began": time.time(),
        }
        self._write()

    def failed(self, error: BaseException | None) -> None:
        """Records the exception that ends this rank. Another rank's exception is not recorded twice.

        A rank that waits in a collective, and has recorded a hang, fails when the rank that hangs ends.
        """
        if self.content.get("ended"):
            return
        lines = "".join(traceback.format_exception(error)).splitlines()[-LINES:]
        self._end(lines, "elsewhere" if getattr(error, "elsewhere", False) else "failed")

    def hangs(self, text: str) -> None:
        """Records that this rank makes no progress."""
        self._end([text], "hang")

    def remove(self) -> None:
        """Deletes the record, because this rank ends well."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _end(self, lines: list[str], kind: str) -> None:
        progress = status.progress
        now = time.time()
        since = now - (time.monotonic() - progress.since)
        ended = {"kind": kind, "at": now, "since": since, "step": progress.step or 0, "doing": progress.doing}
        ended["lines"] = lines
        self.content["ended"] = ended
        self._write()

    def _write(self) -> None:
        with suppress(OSError):  # a full disk is reported by the next write of metrics or a checkpoint
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.content), encoding="utf-8")


def agent() -> str:
    """Returns an id of the agent of torchrun that started this rank. All its attempts have the same id.

    The id is torchrun's folder for logs, which no other agent of the host has. (Every job without `--rdzv-id` has the
    same id of the job, `none`.) Without this folder (`--log-dir /dev/null`), the id is that of the job.
    """
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE", "")  # FOLDER/attempt_N/LOCAL_RANK/error.json
    return f"{socket.gethostname()} {errors.rpartition('/attempt_')[0] or os.environ.get(RUN_ID)}"


def has_begun(run: Path, number: int, agents: Collection[str]) -> bool:
    """Whether an earlier attempt of this torchrun has begun the run, which `--fresh` must not start over again.

    One agent in common is enough, because others may have been lost and replaced.

    Args:
        number: number of this attempt, counted from 1.
        agents: the agents of all ranks (see `agent`).
    """
    with suppress(OSError):
        recorded = (run / "logs" / AGENTS).read_text(encoding="utf-8").splitlines()
        return number > 1 and not set(agents).isdisjoint(recorded)
    return False


def record_last_attempt(run: Path, agents: Collection[str]) -> None:
    """Records the failure that the ranks of the last attempt left behind, if there was one. The first rank calls it.

    A rank that was killed left no end in its file. It is taken for the cause; otherwise the rank that failed first. If
    the ranks hung, it is a rank that is behind the others and does not wait for them.

    Args:
        agents: the agents of all ranks, which the next attempt compares with its own (see `has_begun`).
    """
    with suppress(OSError):
        (run / "logs").mkdir(exist_ok=True)
        (run / "logs" / AGENTS).write_text("".join(f"{one}\n" for one in sorted(agents)), encoding="utf-8")
    found = []
    for path in sorted((run / "logs" / RANKS).glob("*.json")):
        with suppress(OSError, ValueError):  # written by half
            content = json.loads(path.read_text(encoding="utf-8"))
            found.append((content, path.stat().st_mtime))
        with suppress(OSError):  # the record of the next attempt replaces it
            path.unlink(missing_ok=True)
    if not found:
        return
    order = {"failed": 1, "hang": 2, "elsewhere": 3}

    def likelihood(content: dict[str, Any]) -> tuple:
        ended = content.get("ended")
        if ended is None:
            return (0,)
        if ended["kind"] != "hang":
            return (order[ended["kind"]], ended["at"])
        waits = waits_for_other_ranks(run, content["attempt"], content["rank"])
        return (order["hang"], ended["step"], waits, ended["since"])

    first = min((content for content, _ in found), key=likelihood)
    ends = [content["ended"] for content, _ in found if content.get("ended")]
    last = max((end["step"] for end in ends), default=0) or last_step(run) + 1
    own = first.get("ended") or {}
    at = min((end["at"] for end in ends), default=last_sign(run, max(changed for _, changed in found)))
    append_failure(
        run,
        attempt=first["attempt"],
        rank=first["rank"],
        host=first["host"],
        hang=any(end["kind"] == "hang" for end in ends),
        exit_code=None,
        signal=None,
        step=last,
        doing=own.get("doing"),
        stderr=own.get("lines", ["the rank was killed, or its host was lost"]),
        began=first["began"],
        at=at,
        restarted=True,
    )


def last_step(run: Path) -> int:
    """Returns the last step in `metrics.jsonl`; 0 if it has none."""
    with suppress(OSError, ValueError, IndexError):
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read().splitlines(keepends=True)
        return int(json.loads(next(line for line in reversed(lines) if line.endswith(b"\n")))["step"])
    return 0


def last_sign(run: Path, at: float) -> float:
    """Returns the time of the last sign of life of a run, in seconds since 1970, at least `at`."""
    with suppress(OSError):
        return max(at, (run / "metrics.jsonl").stat().st_mtime)
    return at
