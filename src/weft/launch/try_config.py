"""Tries a config with real steps on local processes, to compare its measured time with its predicted time."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.launch.local import SIGNALS, checked_nproc, run_once
from weft.processes import signal_handler
from weft.train.micro_batch import NO_MEMORY, Tried, trial_command


def try_config(config: RunConfig, ranks: int, seconds: float = 60.0) -> Tried | None:
    """Makes a few training steps of a run, in local processes and a scratch directory.

    Args:
        config: a checked config, whose data exist.
        ranks: number of local processes.
        seconds: no further step begins after this time.

    Returns:
        Seconds of a step and peak memory; None if the memory is not sufficient.

    Raises:
        UserError: the ranks cannot be started, or a rank failed; it has printed why.
        KeyboardInterrupt: a signal ended the trial.
    """
    checked_nproc(ranks, "--devices")
    received: list[int] = []
    with tempfile.TemporaryDirectory(prefix="weft-try-") as name:
        folder = Path(name)
        command = trial_command(config, folder, seconds, ranks)
        with signal_handler(lambda number, frame: received.append(number), *SIGNALS):
            found = run_once(command, ranks, None, received)
        if received:
            raise KeyboardInterrupt
        codes = [rank.exitcode for rank in found.ranks]
        if any(
            code in (NO_MEMORY, -signal.SIGKILL) and number not in found.killed for number, code in enumerate(codes)
        ):
            return None
        if any(codes):
            raise UserError(f"the trial failed with exit codes {', '.join(map(str, codes))}; the messages are above")
        line = (folder / "tried-0.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return Tried(**json.loads(line))
