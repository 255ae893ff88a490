"""What ends a run unasked: which rank, of what, and whether it was the user's own code.

A rank that cannot go on takes the others with it, and these see no more than a broken connection. So no rank prints its
traceback: each reports it to the launcher (by a pipe to ours, in the file that torchrun names), which shows that of the
rank that failed first.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from weft.config.custom_components import OWN_PARTS
from weft.errors import UserError, is_own, short_path, told_by_another, told_type
from weft.formatting import byte_size
from weft.observe import status
from weft.observe.logs import log_path, log_to_file, open_log

MISTAKE, OWN, INTERNAL = "mistake", "own", "internal"  # of the user's input; in the user's code; in ours, or beneath it
EXIT_LOST = 3
SPEAKING = 5  # seconds, in which another rank has said what all have found
EXIT_BY_SIGNAL = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_WORD = "weft"  # the key of what only our launcher reads


class Failure(Protocol):
    """What a launcher knows of a rank that failed."""

    @property
    def pid(self) -> int: ...
    @property
    def exitcode(self) -> int: ...
    @property
    def message(self) -> Any: ...


def told(error: Exception, config: Mapping[str, Any], logs: Path | None = None) -> int:
    """Say what ended this process, or leave word of it where a launcher will say it.

    Args:
        config: the run's, as plain data, to name the part that the user's code is.
        logs: the run directory that the traceback is to be logged in, if the run has not come to that.

    Returns:
        The exit code.

    Raises:
        Exception: `error` itself, if nobody else would show it, and it is no lack of memory or disk space and not from
            the user's code.
    """
    log, line, rank = logging.getLogger("weft.train"), lacking(error), int(os.environ.get("RANK", 0))
    if line is not None and logs is not None:
        place = log_path(logs, rank)
        with suppress(UserError):  # the disk may be what is full
            if open_log() != place.absolute():
                log_to_file(logs, rank)
            line += f"; the traceback is in {place}"
    if open_log() is not None:
        log.error("this rank ends", exc_info=error)
    if line is not None and "RANK" in os.environ:
        line = f"rank {rank}: {line}"
    own = line or own_part(error, config)
    text = own or "".join(traceback.format_exception(error))
    if not leave_word(text, OWN if own else INTERNAL):
        if own is None:
            raise error
        print(own, file=sys.stderr, flush=True)
    return 2 if own else 1


def lacking(error: Exception) -> str | None:
    """One line if it was memory, or room on a disk, that was lacking."""
    what = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}; free space and run the same command again"
    if not isinstance(error, MemoryError) and not (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(what)):
        return None
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)|[Uu]nable to allocate ([\d.]+ \w+)", what)
    size = next(filter(None, asked.groups()), "") if asked else ""
    if size.isdecimal() or size.endswith("bytes"):
        size = byte_size(int(size.removesuffix("bytes")))
    device = "the GPU's" if "CUDA" in what else "this machine's"
    return (
        f"out of memory: {device} memory has no room for {f'another {size}' if size else 'what was asked for'}; lower "
        "training.micro_batch_size or data.sequence_length, set training.activation_checkpointing: full, or shard over "
        "more ranks (parallel)"
    )


_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)


def told_mistake(error: UserError) -> UserError:
    """Leave word of a mistake, which `weft` itself prints; torchrun shows it again below its own words.

    Of a mistake that all ranks find one speaks on each machine. The first to leave has its launcher end the others, so
    those that say nothing wait for it.
    """
    if not told_by_another(error):
        leave_word(str(error), MISTAKE)
    elif status.connected() or "TORCHELASTIC_ERROR_FILE" in os.environ:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SPEAKING)
    return error


def leave_word(text: str, kind: str) -> bool:
    """Report what ended this rank to its launcher; False if there is no launcher."""
    said = {"py_callstack": text, "timestamp": str(int(time.time()))}
    word = {"message": text.partition("\n")[0], "extraInfo": said, _WORD: {"kind": kind, "time": time.time()}}
    if status.failed(word):
        return True
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or "RANK" not in os.environ:
        return False
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
    words = {rank: failure.message[_WORD] for rank, failure in failures.items() if _word_of(failure)}
    told_by = sorted(words, key=lambda rank: words[rank]["time"])
    for rank in told_by:
        if words[rank]["kind"] != INTERNAL:
            if words[rank]["kind"] == OWN:
                say(failures[rank].message["extraInfo"]["py_callstack"])
            return 2
    stopped = [code for code in codes if code in EXIT_BY_SIGNAL]
    if stopped:
        return stopped[0]
    # SIGTERM is what the launcher sends to the ranks that are left.
    killed = [(rank, f) for rank, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    if killed:
        rank, failure = killed[0]
        by = _name(-failure.exitcode)
        say(f"rank {rank} (process {failure.pid}) was killed by {by}; {how_to_go_on(run_directory)}")
        return EXIT_LOST
    if told_by:
        rank = told_by[0]
        say(f"rank {rank} failed:\n{failures[rank].message['extraInfo']['py_callstack']}")
        return 1
    return next((code for code in codes if code > 0), 128 + signal.SIGTERM)


def _word_of(failure: Failure) -> bool:
    return isinstance(failure.message, dict) and _WORD in failure.message


def say(text: str) -> None:
    """One more line on stderr."""
    print(text.rstrip("\n"), file=sys.stderr, flush=True)


def _name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (so the system ends a process when memory runs out)" if name == "SIGKILL" else name


def how_to_go_on(run_directory: Path) -> str:
    """What is saved, and what the same command will do."""
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
    own = [number for number, (frame, _, _) in enumerate(steps) if is_own(frame.f_code.co_filename)]
    if not own or any(_communicates(frame.f_code.co_filename) for frame, _, _ in steps[own[-1] :]):
        return None
    frame, line, _ = steps[own[-1]]
    head = f"{short_path(frame.f_code.co_filename)}:{line}: {told_type(error)}"
    part = _part([steps[number][0] for number in reversed(own)], config)
    way = "".join(traceback.format_exception(type(error), error, steps[own[0]][2]))
    return f"{head}{part}\n{way}"


def _walk(trace: TracebackType | None) -> Iterator[tuple[FrameType, int, TracebackType]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno, trace
        trace = trace.tb_next


def _communicates(file: str) -> bool:
    """A file of PyTorch's that speaks to other ranks; DTensor's operators do so by others."""
    where = Path(file).as_posix()
    return "/torch/distributed/" in where and "/torch/distributed/tensor/" not in where


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
