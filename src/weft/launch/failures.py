"""What ends a run unasked: which rank, of what, and whether it was the user's own code.

A rank that cannot go on takes the others with it, and these see no more than a broken connection. So no rank prints its
traceback: each leaves word in the file that PyTorch's elastic agent names, and the launcher (ours, or torchrun) shows
that of the one which failed first.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from weft.config.errors import UserError, told_by_another
from weft.config.own import OWN_PARTS

MISTAKE, OWN, INTERNAL = "mistake", "own", "internal"  # of the user's input; in the user's code; in ours, or beneath it
EXIT_LOST = 3
SPEAKING = 5  # seconds, in which another rank has said what all have found
EXIT_BY_SIGNAL = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_WORD = "weft"  # the key of what only our launcher reads


class Failure(Protocol):
    """What the elastic agent knows of a rank that failed (its `ProcessFailure`)."""

    pid: int
    exitcode: int
    message: Any


def told(error: Exception, config: Mapping[str, Any]) -> int:
    """Say what ended this process, or leave word of it where a launcher will say it.

    Args:
        config: the run's, as plain data, to name the part that the user's code is.

    Returns:
        The exit code.

    Raises:
        Exception: `error` itself, if it is none of the user's code and nobody else would show it.
    """
    own = own_part(error, config)
    log = logging.getLogger("weft.train")
    if log.hasHandlers():  # else nothing is there yet but Python's last resort, which is the terminal
        log.error("this rank ends", exc_info=error)
    text = own or "".join(traceback.format_exception(error))
    if not leave_word(text, OWN if own else INTERNAL):
        if own is None:
            raise error
        print(own, file=sys.stderr, flush=True)
    return 2 if own else 1


def told_mistake(error: UserError) -> UserError:
    """Leave word of a mistake, which `weft` itself prints; torchrun shows it again below its own words.

    Of a mistake that all ranks find one speaks on each machine. The first to leave has its launcher end the others, so
    those that say nothing wait for it.
    """
    if not told_by_another(error):
        leave_word(str(error), MISTAKE)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ:
        time.sleep(SPEAKING)
    return error


def leave_word(text: str, kind: str) -> bool:
    """Write what ended this rank where its launcher looks for it; False if there is no launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or "RANK" not in os.environ:
        return False
    said = {"py_callstack": text, "timestamp": str(int(time.time()))}
    word = {"message": text.partition("\n")[0], "extraInfo": said, _WORD: {"kind": kind, "time": time.time()}}
    try:
        Path(path).write_text(json.dumps({"message": word}), encoding="utf-8")
    except OSError:
        return False
    return True


def account_for(failures: Mapping[int, Failure], run_directory: Path) -> int:
    """Say which rank ended the run, and how, once.

    Args:
        failures: of the ranks that did not end with 0, the first ones first.

    Returns:
        The exit code for all of them.
    """
    codes = [failure.exitcode for failure in failures.values()]
    stopped = [code for code in codes if code in EXIT_BY_SIGNAL]
    if stopped:
        return stopped[0]
    words = {rank: failure.message[_WORD] for rank, failure in failures.items() if _word_of(failure)}
    told_by = sorted(words, key=lambda rank: words[rank]["time"])
    for rank in told_by:
        if words[rank]["kind"] != INTERNAL:
            if words[rank]["kind"] == OWN:
                _say(failures[rank].message["extraInfo"]["py_callstack"])
            return 2
    # SIGTERM is what the agent sends to the ranks that are left.
    killed = [(rank, f) for rank, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    if killed:
        rank, failure = killed[0]
        by = _name(-failure.exitcode)
        _say(f"rank {rank} (process {failure.pid}) was killed by {by}; {_how_to_go_on(run_directory)}")
        return EXIT_LOST
    if told_by:
        rank = told_by[0]
        _say(f"rank {rank} failed:\n{failures[rank].message['extraInfo']['py_callstack']}")
        return 1
    return next((code for code in codes if code > 0), 128 + signal.SIGTERM)


def _word_of(failure: Failure) -> bool:
    return isinstance(failure.message, dict) and _WORD in failure.message


def _say(text: str) -> None:
    print(text.rstrip("\n"), file=sys.stderr, flush=True)


def _name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (so the system ends a process when memory runs out)" if name == "SIGKILL" else name


def _how_to_go_on(run_directory: Path) -> str:
    from weft.checkpoint.load import checkpoints

    saved = checkpoints(run_directory)
    logs = f"what each rank saw is in {run_directory / 'logs'}"
    if not saved:
        return f"there is no checkpoint yet, so the same command starts over; {logs}"
    step = int(saved[-1].name.rpartition("-")[2])
    return f"the last checkpoint is that of step {step:,}, and the same command goes on from there; {logs}"


def own_part(error: BaseException, config: Mapping[str, Any]) -> str | None:
    """What went wrong in the user's own code: a line that says where, then the way there from the user's file on.

    None if `error` did not come from there: no frame of it is the user's, or PyTorch failed at talking to other ranks
    beneath one that is (a model's forward gathers weights).
    """
    steps = list(_walk(error.__traceback__))
    own = [number for number, (frame, _, _) in enumerate(steps) if _is_own(frame.f_code.co_filename)]
    if not own or any(_communicates(frame.f_code.co_filename) for frame, _, _ in steps[own[-1] :]):
        return None
    frame, line, _ = steps[own[-1]]
    what = " ".join(str(error).split())
    head = f"{_short(frame.f_code.co_filename)}:{line}: {type(error).__name__}" + (f": {what}" if what else "")
    part = _part([steps[number][0] for number in reversed(own)], config)
    way = "".join(traceback.format_exception(type(error), error, steps[own[0]][2]))
    return f"{head}{part}\n{way}"


def _walk(trace: TracebackType | None) -> Iterator[tuple[FrameType, int, TracebackType]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno, trace
        trace = trace.tb_next


def _is_own(file: str) -> bool:
    """A file that is neither Weft's, nor Python's, nor an installed package's."""
    path = Path(file)
    if file.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    ours = [Path(__file__).parent.parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))]
    return not any(path.resolve().is_relative_to(root.resolve()) for root in ours)


def _communicates(file: str) -> bool:
    """A file of PyTorch's that speaks to other ranks; DTensor's operators do so by others."""
    where = Path(file).as_posix()
    return "/torch/distributed/" in where and "/torch/distributed/tensor/" not in where


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _part(frames: list[FrameType], config: Mapping[str, Any]) -> str:
    """` (in my:Boom, optimizer)`: the part of the config whose module the innermost frame of the user's is in."""
    parts = list(_own_types(config))
    for frame in frames:
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_qualname.partition(".")[0]
        here = [(key, type_) for key, type_ in parts if type_.partition(":")[0] == module]
        # The very class, or another one of its module that this one helps.
        for key, type_ in sorted(here, key=lambda part: part[1].partition(":")[2] != name):
            return f" (in {type_}, {key})"
    return ""


def _own_types(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every `type: module:Class` of a config, with the key of its section, and every part of the model that is one."""
    if isinstance(tree, Mapping):
        if ":" in str(tree.get("type", "")):
            yield key, tree["type"]
        for name, value in tree.items():
            if key == "model" and name in OWN_PARTS and ":" in str(value):
                yield f"model.{name}", value
            yield from _own_types(value, f"{key}.{name}" if key else name)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _own_types(value, f"{key}[{number}]")
