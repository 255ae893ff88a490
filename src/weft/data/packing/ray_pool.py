"""Encodes a pack's parts on a Ray cluster whose machines share storage."""

from __future__ import annotations

import logging
import os
from typing import Any

from weft.data.packing.part_files import Job, Part
from weft.data.packing.pool import OnProgress, Outcome, Pool, picklable
from weft.errors import UserError


class RayPool(Pool):
    """A pool of workers on a Ray cluster, with one task per part. Ray repeats the tasks of a machine that is lost.

    Args:
        address: address of the cluster; "": the address in RAY_ADDRESS, or else a new cluster on this machine.

    Raises:
        UserError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, job: Job, encoder: Any, address: str, on_progress: OnProgress):
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # disables a warning about GPUs
        try:
            import ray  # pyright: ignore[reportMissingImports] (an extra)
        except ImportError:
            raise UserError("--ray needs Ray, which is not installed: pip install 'weft-train[ray]'") from None
        self._ray, self._on_progress = ray, on_progress
        self._started = not ray.is_initialized()
        if self._started:
            try:
                ray.init(address=address or None, logging_level=logging.ERROR, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(
                    f"--ray {address}: no Ray cluster there ({reason}); start a cluster with `ray start --head`"
                ) from None
        self._cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._task = ray.remote(_encode).options(num_cpus=1, max_retries=3, runtime_env={"env_vars": threads})
        self._shared = ray.put((job, encoder))
        self._parts: dict[Any, Part] = {}

    def has_room(self, remaining: int) -> bool:
        return len(self._parts) < 2 * self._cores  # some tasks are queued, so that no core waits

    def submit(self, part: Part) -> None:
        self._parts[self._task.remote(self._shared, part)] = part

    def wait(self, block: bool) -> list[Outcome]:
        if not self._parts:
            return []
        ended, _ = self._ray.wait(list(self._parts), num_returns=1, timeout=None if block else 0)
        outcomes: list[Outcome] = []
        for reference in ended:
            part = self._parts.pop(reference)
            try:
                failure, tokens = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[0]
                failure = UserError(
                    f"a Ray worker died while it encoded this input ({reason}); repeat the command to resume", str(part)
                )
            else:
                self._on_progress(part.size, tokens)
            outcomes.append((part.index, failure))
        return outcomes

    def close(self) -> None:
        for reference in self._parts:
            self._ray.cancel(reference, force=True)
        self._parts.clear()
        if self._started and self._ray.is_initialized():
            self._ray.shutdown()


_encoders: dict[str, Any] = {}  # open encoders of this Ray worker: loading one can take longer than encoding a part


def _encode(shared: tuple[Job, Any], part: Part) -> tuple[BaseException | None, int]:
    """Encodes a part in a Ray worker; returns the error, if any, and the number of tokens.

    Args:
        shared: the job and the encoder, which all tasks share.
    """
    from weft.data.packing.encode_part import encode_part

    job, encoder = shared
    encoder = _encoders.setdefault(repr(encoder.__reduce__()), encoder)
    tokens = 0

    def on_progress(raw_bytes: int, new: int) -> None:
        nonlocal tokens
        tokens += new

    try:
        encode_part(job, part, encoder, on_progress=on_progress)
    except Exception as error:  # the parent raises it when all earlier parts are appended
        return picklable(error), tokens
    return None, tokens
