"""A pack's parts encoded by a Ray cluster, on storage that all its machines see."""

from __future__ import annotations

import logging
import os
from typing import Any

from weft.data.packing.part_files import Job, Part
from weft.data.packing.pool import OnProgress, Outcome, Pool, portable
from weft.errors import UserError


class RayPool(Pool):
    """Workers on a Ray cluster: a task a part; Ray does the part of a lost machine again.

    Args:
        address: of the cluster; "": RAY_ADDRESS, or a new one on this machine.

    Raises:
        UserError: Ray is not installed, or there is no cluster.
    """

    def __init__(self, job: Job, encoder: Any, address: str, on_progress: OnProgress):
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a warning about GPUs, which are not used
        try:
            import ray  # pyright: ignore[reportMissingImports] (an extra)
        except ImportError:
            raise UserError("--ray needs Ray, which is not installed: pip install 'weft-train[ray]'") from None
        self._ray, self._on_progress = ray, on_progress
        self._own = not ray.is_initialized()
        if self._own:
            try:
                ray.init(address=address or None, logging_level=logging.ERROR, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                said = str(error).splitlines()[0]
                raise UserError(f"--ray {address}: no cluster there ({said}); `ray start --head` makes one") from None
        self._cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._task = ray.remote(_encode).options(num_cpus=1, max_retries=3, runtime_env={"env_vars": threads})
        self._shared = ray.put((job, encoder))
        self._parts: dict[Any, Part] = {}

    def room(self, remaining: int) -> bool:
        return len(self._parts) < 2 * self._cores  # some wait, so that no core does

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
                said = str(error).strip().splitlines()[0]
                failure = UserError(f"a Ray worker died here ({said}); the same command goes on", str(part))
            else:
                self._on_progress(part.size, tokens)
            outcomes.append((part.index, failure))
        return outcomes

    def close(self) -> None:
        for reference in self._parts:
            self._ray.cancel(reference, force=True)
        self._parts.clear()
        if self._own and self._ray.is_initialized():
            self._ray.shutdown()


_encoders: dict[str, Any] = {}  # of this Ray worker, by what they are: loading one takes longer than many a part


def _encode(shared: tuple[Job, Any], part: Part) -> tuple[BaseException | None, int]:
    """In a Ray worker: encode a part; what went wrong, and how many tokens there are."""
    from weft.data.packing.encode_part import encode_part

    job, encoder = shared
    encoder = _encoders.setdefault(repr(encoder.__reduce__()), encoder)
    tokens = 0

    def on_progress(raw_bytes: int, new: int) -> None:
        nonlocal tokens
        tokens += new

    try:
        encode_part(job, part, encoder, on_progress=on_progress)
    except Exception as error:  # the parent tells it, at its turn
        return portable(error), tokens
    return None, tokens
