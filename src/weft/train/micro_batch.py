"""Chooses `training.micro_batch_size: auto`: tries sizes with real steps before the run is built.

Each rank starts a process of its own for the trial (`weft.train.trial`), and these processes are the ranks of another
job. So a size that does not fit ends only them, and the run's weights, random numbers and data are those of a run with
the chosen number in its config.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.config.derive import batch_sequences, sequence_length, split_batch
from weft.config.dump import dump_yaml
from weft.config.mesh import ParallelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.formatting import byte_size, counted, timing
from weft.observe.manifest import read_manifest
from weft.observe.status import START_SECONDS, doing
from weft.parallel.objective import Objective
from weft.parallel.ranks import all_gather_object, broadcast_object, error_on_all_ranks
from weft.planner.measure import device_name
from weft.planner.memory import memory_of
from weft.processes import ELASTIC, LAUNCHER, STORE_SOCKET, available_memory
from weft.train.data import layout_of
from weft.train.job import Job

SECONDS = 60.0  # after which no further size is tried
MOST_BETWEEN = 3  # sizes that are tried between the largest that fits and the smallest that does not
CPU_SHARE = 0.9  # of the memory that is available: a validation and other programs need some
FASTER = 1.02  # the smallest size that is at most this many times slower than the fastest is chosen
NO_MEMORY = 9  # exit code of a process of a trial: a size does not fit
POLL = 0.1  # seconds between two looks at the processes
GRACE = 1.0  # seconds in which further ranks report why they failed
KEY = "micro_batch_trials"  # of the manifest
# Keys of `training` on which memory and speed of a step depend.
DECISIVE = ("dtype", "reduce_dtype", "fp8", "qat", "compile", "activation_checkpointing", "only_rows_from", "freeze")
KILLED = -9  # exit code of a process that the kernel killed, because a machine's memory is full
ALONE = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", LAUNCHER, ELASTIC, STORE_SOCKET)


@dataclass(frozen=True)
class Tried:
    """A size of micro-batches that fits.

    Attributes:
        size: number of samples in a micro-batch.
        seconds: seconds of a step, on the slowest rank.
        peak_bytes: peak memory of the rank with the highest (see `weft.observe.flops.memory_bytes`).
        reduces_every: whether gradients were reduced with every micro-batch.
    """

    size: int
    seconds: float
    peak_bytes: int
    reduces_every: bool


def choose_micro_batch(job: Job, objective: Objective, *, given: bool) -> Job:
    """Returns the job with a number in place of `training.micro_batch_size: auto`. All ranks must call it.

    The last session's number is reused if everything on which memory and speed depend is as it was.

    Args:
        given: whether the batches are passed to `Trainer.step`.

    Raises:
        UserError: on all ranks: no size fits, a trial fails, or the batches are given.
    """
    if job.config.training.micro_batch_size != "auto":
        return job
    if given:
        raise error_on_all_ranks("training.micro_batch_size: auto needs data.train; set a number for batches of step")
    samples, config = layout_of(objective, job.config).sequences, job.config
    per_rank, _ = split_batch(batch_sequences(config), sequence_length(config), job.world.shape, None, config.parallel)
    sizes = candidates(max(1, per_rank // samples), job.world.shape.pp, config.parallel)
    key = _digest(job, per_rank)
    found: Any = job.world.agree(lambda: read_manifest(job.run.path).get(KEY), only_first=True)
    if not (isinstance(found, dict) and found.get("key") == key):
        found = _Trials(job, sizes).choose() | {"key": key}
        chosen = next(one for one in found["tried"] if one["size"] == found["chosen"])
        found["predicted_bytes"] = predicted_bytes(job, Tried(**chosen))
        job.console.line(describe(found))
    else:
        job.console.line(f"training.micro_batch_size: {found['chosen']} (auto; tried in an earlier session)")
    training = config.training.model_copy(update={"micro_batch_size": int(found["chosen"])})
    return replace(job, config=config.model_copy(update={"training": training}), micro_batch=found)


def candidates(samples: int, pp: int, parallel: ParallelSection) -> list[int]:
    """Returns the sizes that divide the samples of a step on each rank, and that the pipeline schedule supports."""
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    return [size for size in sizes if pp == 1 or parallel.supports(samples // size, pp)] or [1]


def powers(sizes: Sequence[int]) -> list[int]:
    """Returns for each power of two the largest size that is not larger.

    >>> powers([1, 2, 3, 4, 6, 12])
    [1, 2, 4, 6, 12]
    """
    limits = [1 << number for number in range(max(sizes).bit_length() + 1)]
    return sorted({max(size for size in sizes if size <= limit) for limit in limits if limit >= sizes[0]})


def fastest(tried: Sequence[Tried]) -> int:
    """Returns the smallest size whose steps are at most `FASTER` times slower than the fastest."""
    least = min(one.seconds for one in tried)
    return min(one.size for one in tried if one.seconds <= FASTER * least)


def describe(found: dict[str, Any]) -> str:
    """Returns a line about the chosen size and the sizes that were tried."""
    tried = {one["size"]: one for one in found["tried"]}
    chosen = tried[found["chosen"]]
    times = ", ".join(f"{size}: {timing(one['seconds'])}" for size, one in sorted(tried.items()))
    full = found["no_memory"] and f"; {found['no_memory']} does not fit"
    predicted = found["predicted_bytes"]
    memory = byte_size(chosen["peak_bytes"]) + (f", predicted {byte_size(predicted)}" if predicted else "")
    return (
        f"training.micro_batch_size: {found['chosen']} (auto; {timing(chosen['seconds'])} per step, peak memory "
        f"{memory}; seconds per step of sizes tried: {times}{full or ''})"
    )


def predicted_bytes(job: Job, tried: Tried) -> int | None:
    """Returns the memory of the rank with the highest, by the planner's formulas; None for models that they lack."""
    training, cpu = job.config.training, job.world.device.type == "cpu"
    reduction = "every" if tried.reduces_every else "last"
    sections = {
        "training": training.model_copy(update={"micro_batch_size": tried.size}),
        "parallel": job.config.parallel.model_copy(update={"reduce_gradients": reduction}),
    }
    config = job.config.model_copy(update=sections)
    try:
        return round(max(one.total for one in memory_of(config, job.world.ranks, dtype=training.dtype, cpu=cpu)))
    except UserError:  # not the built-in decoder
        return None


def _digest(job: Job, per_rank: int) -> str:
    """Returns a digest of everything on which memory and speed of a step depend."""
    plain, training = job.config.as_dict(), job.config.training.model_dump(mode="json")
    sections = [plain.get(name) for name in ("model", "parallel", "objective", "optimizer", "adapter")]
    facts = [sections, [training[name] for name in DECISIVE], job.world.shape.sizes, per_rank]
    facts += [sequence_length(job.config), device_name(job.world.device)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def trial_command(
    config: RunConfig, folder: Path, seconds: float, local_ranks: int, sizes: Sequence[int] = ()
) -> list[str]:
    """Writes a config to a folder, and returns the command of one rank of a trial (`weft.train.trial`).

    Args:
        seconds: no further size is tried after this time.
        local_ranks: number of ranks on this host, which share its memory.
        sizes: numbers of samples in a micro-batch; the config's if empty.
    """
    file, limit = folder / "run.yaml", int(available_memory() * CPU_SHARE / local_ranks)
    file.write_text(dump_yaml(config), encoding="utf-8")
    words = [os.getpid(), file, folder, f"{seconds:.1f}", limit, *sizes]
    return [sys.executable, "-m", "weft.train.trial", *map(str, words)]


class _Trials:
    """The trials of one run, from the view of one rank."""

    def __init__(self, job: Job, sizes: list[int]):
        self.job, self.sizes = job, sizes
        self.tried: dict[int, Tried] = {}
        self.no_memory: int | None = None  # the smallest size that does not fit
        self.end = time.monotonic() + SECONDS

    def choose(self) -> dict[str, Any]:
        """Tries powers of two, then sizes between the largest that fits and the smallest that does not."""
        self.job.console.line(f"training.micro_batch_size: auto: trying up to {counted(self.sizes[-1], 'sample')}")
        self.run(powers(self.sizes))
        if not self.tried:
            raise error_on_all_ranks(
                f"training.micro_batch_size: auto: not even {self.sizes[0]} per micro-batch fits in memory; set "
                "training.activation_checkpointing: full, shorten data.sequence_length, or shard over more ranks"
            )
        for _ in range(MOST_BETWEEN):
            largest = max(self.tried)
            between = [size for size in self.sizes if largest < size < (self.no_memory or 0)]
            late = broadcast_object(time.monotonic() > self.end)
            if late or not between or fastest(list(self.tried.values())) != largest:
                break
            self.run([between[len(between) // 2]])
        tried = list(self.tried.values())
        return {"chosen": fastest(tried), "tried": [asdict(one) for one in tried], "no_memory": self.no_memory}

    def run(self, sizes: list[int]) -> None:
        """Tries sizes, in processes that end when one of them does not fit."""
        with tempfile.TemporaryDirectory(prefix="weft-trial-") as name:
            folder = Path(name)
            child = self._start(folder, sizes)
            doing("trying sizes of micro-batches", "trial", START_SECONDS)
            try:
                codes = self._wait(child)
            finally:
                child.kill()
                child.wait()
            out = folder / f"tried-{self.job.world.rank}.jsonl"
            lines = out.read_text().splitlines() if out.exists() else []
            last = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-1:]
        answers = all_gather_object(([json.loads(line) for line in lines], codes[self.job.world.rank], last))
        fits = min(len(found) for found, _, _ in answers)
        self.tried |= {one["size"]: Tried(**one) for one in answers[0][0][:fits]}
        failed = [(number, code, last) for number, (_, code, last) in enumerate(answers) if code]
        if any(code in (NO_MEMORY, KILLED) for _, code, _ in failed):
            self.no_memory = sizes[fits]
        elif failed:
            number, _, last = failed[0]
            raise error_on_all_ranks(
                f"training.micro_batch_size: auto: the trial failed on rank {number}: {' '.join(last)}; correct it, or "
                "set a number"
            )

    def _start(self, folder: Path, sizes: list[int]) -> subprocess.Popen:
        """Starts this rank's process of a trial, which joins those of the other ranks at a new port."""
        job = self.job
        changes: dict[str, Any] = {"training": job.config.training.model_copy(update={"micro_batch_size": sizes[0]})}
        kept = job.world.agree(lambda: job.run.kept_reduction(job.world.shape.sizes), only_first=True)
        parallel = job.config.parallel
        if kept is not None and parallel.reduces_by_memory:
            changes["parallel"] = parallel.model_copy(update={"reduce_gradients": kept})
        config: RunConfig = job.config.model_copy(update=changes)
        with socket.create_server(("", 0)) as listener:
            port = broadcast_object(listener.getsockname()[1])
        environment = {name: value for name, value in os.environ.items() if name not in ALONE}
        if "RANK" in environment:
            environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        left = max(0.0, self.end - time.monotonic())
        command = trial_command(config, folder, left, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), sizes)
        with (folder / "stderr").open("w") as errors:
            return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)

    def _wait(self, child: subprocess.Popen) -> list[int | None]:
        """Waits until the processes of all ranks have ended, or one has failed. Returns their exit codes."""
        while True:
            time.sleep(POLL)
            codes = all_gather_object(child.poll())
            if all(code == 0 for code in codes):
                return codes
            if any(codes):
                time.sleep(GRACE)
                return all_gather_object(child.poll())
