"""What the tests of several processes share: the processes of a run, and what ranks do in them."""

import os
import sys
import time
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1] / "parallel"))

from pool import weft_command


def processes_in(folder: Path) -> set[int]:
    """The living processes that work in `folder`: a launcher, its ranks and their loaders."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and Path(os.readlink(process / "cwd")) == folder:
                found.add(int(process.name))
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found


def none_left_in(folder: Path, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not processes_in(folder):
            return True
        time.sleep(0.05)
    return False


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks of a launcher, which it starts in their order."""
    return sorted(child.pid for child in psutil.Process(launcher).children())


def trained(folder: Path, words: list[list[str]], environment: dict[str, str]) -> tuple[int, str]:
    """On each rank: the exit code and stderr of `weft train` with the rank's words, where only variables say that there
    are ranks."""
    os.environ.update(environment)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return weft_command(folder, ["train", *words[int(os.environ["RANK"])]])
