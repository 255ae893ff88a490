"""Detection of ranks that hang: how long a rank may report no progress, and the Python stacks of all ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.launch.failures import print_error
from weft.launch.rank import STACKS_SIGNAL, Rank
from weft.train.failure_record import collectives_file, stacks_file, waits_for_other_ranks

COLLECTIVES_SECONDS = 1.0  # the ranks' own threads notice a hang this much later than the launcher, at most
STACK_SECONDS = 3.0  # a rank that does not write its stacks for this time is killed without them


@dataclass(frozen=True)
class HangWatch:
    """Decides whether a rank hangs.

    Attributes:
        timeout: `training.hang_timeout`, in seconds; None: adapted to the time of the recent steps.
        run: the run directory.
        attempt: number of the attempt to train, counted from 1.
    """

    timeout: float | None
    run: Path
    attempt: int

    @property
    def stacks(self) -> Path:
        """The file to which the stacks of all ranks are appended."""
        return stacks_file(self.run, self.attempt)

    def hangs(self, alive: Sequence[Rank]) -> bool:
        """Whether a rank reports no progress for too long."""
        now = time.monotonic()
        return any(now - rank.since > rank.allowed(self.timeout) for rank in alive)

    def hung_first(self, alive: Sequence[Rank]) -> list[Rank]:
        """Sorts ranks by the likelihood that they cause a hang: ranks that wait for others in a collective come last.

        Suspended ranks come first, then ranks that are behind the others. Waits a short time for the records of the
        last collectives, which the ranks write when they notice the hang.
        """
        end = time.monotonic() + COLLECTIVES_SECONDS
        expected = [collectives_file(self.run, self.attempt, rank.number) for rank in alive if not rank.is_stopped]
        while len(alive) > 1 and time.monotonic() < end and not all(file.exists() for file in expected):
            time.sleep(0.05)

        def likelihood(rank: Rank) -> tuple:
            waits = waits_for_other_ranks(self.run, self.attempt, rank.number)
            return (not rank.is_stopped, rank.step or 0, waits, rank.since)

        return sorted(alive, key=likelihood)

    def dump(self, alive: Sequence[Rank]) -> bool:
        """Appends the Python stacks of all threads of all ranks to the file. Returns False if it cannot be written."""
        states = [str(rank) for rank in alive]
        for rank in alive:
            rank.process.send_signal(STACKS_SIGNAL)
            rank.process.send_signal(signal.SIGCONT)  # a suspended rank handles no signal
        sizes, end = [-1], time.monotonic() + STACK_SECONDS
        while time.monotonic() < end:  # until all ranks have written, and write no more
            before, sizes = sizes, [os.fstat(rank.stacks.fileno()).st_size for rank in alive]
            if before == sizes and all(sizes):
                break
            time.sleep(0.2)
        try:
            self.stacks.parent.mkdir(parents=True, exist_ok=True)
            with self.stacks.open("a", encoding="utf-8") as file:
                for rank, state in zip(alive, states, strict=True):
                    rank.stacks.seek(0)
                    text = rank.stacks.read().decode(errors="replace") or "(the rank wrote no stacks)\n"
                    file.write(f"{state}\n{text}\n")
        except OSError as error:
            print_error(f"{self.stacks}: stacks cannot be written: {error.strerror}; free space or set run.directory")
            return False
        return True
