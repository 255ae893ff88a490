"""Failure reporting: each failure of a run is reported once.

When a rank fails, the other ranks see only a broken connection. Therefore no rank prints its traceback. Each rank sends
its traceback to the launcher, which prints the traceback of the rank that failed first. Weft's launcher receives
tracebacks through a pipe. torchrun receives them in the file that TORCHELASTIC_ERROR_FILE names.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from weft.config.custom_components import custom_types
from weft.errors import UserError, describe_user_exception, is_out_of_memory, reported_elsewhere, user_frames
from weft.formatting import byte_size
from weft.observe import status
from weft.observe.logs import log_path, log_to_file, open_log
from weft.processes import EXIT_LOST, signal_name

MISTAKE, CUSTOM, INTERNAL = "mistake", "custom", "internal"  # who is at fault: the input, custom code, other code
STOPPED = "stopped"  # a signal to any rank; the message is its number
NON_FINITE = "non-finite"  # the loss is not finite; the first rank has printed it
GRACE = 5  # seconds that a rank waits for another rank to report an error that all ranks found
EXIT_BY_SIGNAL = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
_KEY = "weft"  # key of the part of a message that only Weft's launcher reads


class Failure(Protocol):
    """A failed rank, as its launcher sees it.

    Attributes:
        exitcode: exit code of the process; -N if signal N killed the process.
        message: the dict that the rank sent with `send_to_launcher`; any other value if it sent none.
    """

    @property
    def pid(self) -> int: ...
    @property
    def exitcode(self) -> int: ...
    @property
    def message(self) -> Any: ...


def report_exception(error: Exception, config: Mapping[str, Any], logs: Path | None = None) -> int:
    """Reports the exception that ends this process, and returns the exit code.

    Sends the exception to the launcher. If this process has no launcher, and the cause is full memory, a full disk or
    custom code, prints a message instead.

    Args:
        config: the config as plain data, in which custom components are looked up.
        logs: the run directory. If full memory or a full disk is the cause, the traceback is written to the log in this
            directory, even if logging has not begun.

    Raises:
        Exception: `error` itself, if this process has no launcher and the cause is something else.
    """
    if getattr(error, "elsewhere", False):  # another rank failed (`parallel.ranks.agree`)
        _wait_for_report()
    log, line, rank = logging.getLogger("weft.train"), out_of_resources(error), int(os.environ.get("RANK", 0))
    if line is not None and logs is not None:
        place = log_path(logs, rank)
        with suppress(UserError):  # the disk may be full
            if open_log() != place.absolute():
                log_to_file(logs, rank)
            line += f"; the traceback is in {place}"
    if open_log() is not None:
        log.error("this rank exits", exc_info=error)
    if line is not None and "RANK" in os.environ:
        line = f"rank {rank}: {line}"
    brief = line or custom_component_error(error, config)
    text = brief or "".join(traceback.format_exception(error))
    if not send_to_launcher(text, CUSTOM if brief else INTERNAL):
        if brief is None:
            raise error
        print_error(brief)
    return 2 if brief else 1


def out_of_resources(error: Exception) -> str | None:
    """Returns a one-line message with a remedy if `error` means that memory or a disk is full, or that the compiler's
    cache cannot be used; otherwise None.
    """
    what, cache = " ".join(str(error).split()), os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "the compiler's cache"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}; free space and run the same command again"
    if isinstance(error, OSError) and isinstance(error.filename, str) and Path(error.filename).is_relative_to(cache):
        return f"{error.filename}: {error.strerror}; set TORCHINDUCTOR_CACHE_DIR to another folder"
    if type(error).__module__.startswith("torch._") and (full := os.strerror(errno.ENOSPC)) in what:
        return f"{cache}: {full}; free space, or set TORCHINDUCTOR_CACHE_DIR to another folder, and run it again"
    if not is_out_of_memory(error):
        return None
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)|[Uu]nable to allocate ([\d.]+ \w+)", what)
    size = next(filter(None, asked.groups()), "") if asked else ""
    if size.isdecimal() or size.endswith("bytes"):
        size = byte_size(int(size.removesuffix("bytes")))
    device = "the GPU's" if "CUDA" in what else "this machine's"
    return (
        f"out of memory: {device} memory has no space for {f'another {size}' if size else 'an allocation'}; lower "
        "training.micro_batch_size or data.sequence_length, set training.activation_checkpointing: full, or shard over "
        "more ranks (parallel)"
    )


def report_mistake(error: UserError) -> None:
    """Sends a UserError to the launcher.

    This process prints the error on its command line. Weft's launcher does not print it again, but torchrun does.

    If all ranks found the same error, one rank on each machine reports it. The other ranks wait for GRACE seconds,
    because a launcher terminates all ranks as soon as the first one exits.
    """
    if not reported_elsewhere(error):
        send_to_launcher(str(error), MISTAKE)
    else:
        _wait_for_report()


def _wait_for_report() -> None:
    """If this process has a launcher, waits for GRACE seconds.

    In this time, another rank reports the error, and the launcher terminates this rank.
    """
    if status.connected() or "TORCHELASTIC_ERROR_FILE" in os.environ:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE)


def send_to_launcher(text: str, kind: str) -> bool:
    """Sends the failure of this rank to its launcher. Returns False if this process has no launcher.

    Args:
        text: message or traceback.
        kind: MISTAKE (invalid input), CUSTOM (an error of custom code, or full memory or disk), NON_FINITE (a loss that
            is not finite), STOPPED (by a signal) or INTERNAL (other).
    """
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.partition("\n")[0], "extraInfo": extra, _KEY: {"kind": kind, "time": time.time()}}
    if status.failed(message):
        return True
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or "RANK" not in os.environ:
        return False
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError:
        return False
    return True


def read_error_file(path: Path) -> Any:
    """Returns what a rank sent with `send_to_launcher` to the file of torchrun; None if the rank sent nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(path.read_text(encoding="utf-8"))["message"]
    return None


@dataclass(frozen=True)
class Verdict:
    """Which of several failed ranks failed first, and what the launcher does about it.

    Attributes:
        rank: the rank that failed first; None if a signal stopped the ranks, or the first rank is not known.
        code: the exit code of the launcher.
        text: what the launcher prints; "" if a rank has already printed the error.
        restartable: whether the same command, started again, may succeed. It does not help against a mistake in the
            input, an exception in custom code, full memory or a full disk, a loss that is not finite, and a signal
            that asks the ranks to stop.
    """

    rank: int | None
    code: int
    text: str = ""
    restartable: bool = False


def judge_failures(failures: Mapping[int, Failure]) -> Verdict:
    """Finds the rank that failed first, and its reason.

    Args:
        failures: rank -> failure of the ranks that did not exit with code 0, in the order in which they ended.
    """
    messages = {r: f.message for r, f in failures.items() if isinstance(f.message, dict) and _KEY in f.message}
    by_time = sorted(messages, key=lambda rank: messages[rank][_KEY]["time"])
    for rank in by_time:
        kind, text = messages[rank][_KEY]["kind"], messages[rank]["extraInfo"]["py_callstack"]
        if kind == STOPPED:
            return Verdict(None, 128 + int(text))
        if kind != INTERNAL:
            return Verdict(rank, 1 if kind == NON_FINITE else 2, text if kind == CUSTOM else "")
    codes = [failure.exitcode for failure in failures.values()]
    if stopped := [code for code in codes if code in EXIT_BY_SIGNAL]:
        return Verdict(None, stopped[0])
    # The launcher terminates the remaining ranks with SIGTERM.
    killed = [(rank, f) for rank, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    if killed:
        rank, failure = killed[0]
        cause = " (the system does this when memory runs out)" if failure.exitcode == -signal.SIGKILL else ""
        text = f"rank {rank} (process {failure.pid}) was killed by {signal_name(-failure.exitcode)}{cause}"
        return Verdict(rank, EXIT_LOST, text, restartable=True)
    if by_time:
        text = f"rank {by_time[0]} failed:\n{messages[by_time[0]]['extraInfo']['py_callstack']}"
        return Verdict(by_time[0], 1, text, restartable=True)
    failed = next(((rank, f.exitcode) for rank, f in failures.items() if f.exitcode > 0), None)
    if failed is None:
        return Verdict(None, 128 + signal.SIGTERM)
    return Verdict(*failed, restartable=True)


def report_verdict(verdict: Verdict, run_directory: Path | None) -> int:
    """Prints what ended the ranks, and returns the exit code of the launcher.

    Prints nothing if a rank has already printed the error (a mistake in the input), or a signal stopped the ranks.
    """
    if verdict.text:
        hint = f"; {resume_hint(run_directory)}" if verdict.code == EXIT_LOST else ""
        print_error(f"{verdict.text}{hint}")
    return verdict.code


def print_error(text: str) -> None:
    """Prints a text on stderr."""
    print(text.rstrip("\n"), file=sys.stderr, flush=True)


def resume_hint(run_directory: Path | None) -> str:
    """Returns the end of a failure message: the checkpoint from which the same command resumes, and the logs.

    Args:
        run_directory: the run directory. None if the command does not train: there is nothing to resume.
    """
    if run_directory is None:
        return "run the same command again"
    from weft.train.failure_record import last_checkpoint

    logs = f"the logs of the ranks are in {run_directory / 'logs'}"
    step, _ = last_checkpoint(run_directory)
    if not step:
        return f"the run has no checkpoint yet, so the same command starts over; {logs}"
    return f"the same command resumes from the last checkpoint, of step {step:,}; {logs}"


def custom_component_error(error: BaseException, config: Mapping[str, Any]) -> str | None:
    """Returns a message for an exception in custom code: file, line and component, then the traceback.

    The traceback begins at the first frame in custom code.

    Args:
        config: the config as plain data, in which custom components are looked up.

    Returns:
        The message; None if custom code is not the cause. Custom code is not the cause if no frame is in custom code,
        or if custom code called a collective of torch.distributed that failed (the forward of a sharded model
        all-gathers weights).
    """
    frames = user_frames(error)
    if not frames or any(_communicates(f.f_code.co_filename) for f, _ in traceback.walk_tb(frames[-1])):
        return None
    component = _component_of([entry.tb_frame for entry in reversed(frames)], config)
    calls = "".join(traceback.format_exception(type(error), error, frames[0]))
    return f"{describe_user_exception(error)}{component}\n{calls}"


def _communicates(file: str) -> bool:
    """Whether a source file belongs to torch.distributed, except DTensor, whose files call no collectives directly."""
    where = Path(file).as_posix()
    return "/torch/distributed/" in where and "/torch/distributed/tensor/" not in where


def _component_of(frames: list[FrameType], config: Mapping[str, Any]) -> str:
    """Returns the custom component with the innermost frame, as ` (in TYPE, KEY)`; "" if no frame is in a component.

    Args:
        frames: the frames in custom code, innermost first.
    """
    components = list(custom_types(config))
    for frame in frames:
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_qualname.partition(".")[0]
        here = [(type_, key) for key, type_ in components if type_.partition(":")[0] == module]
        if here:  # prefer the class of the frame; otherwise, another class in its module
            type_, key = min(here, key=lambda component: component[0].partition(":")[2] != name)
            return f" (in {type_}, {key})"
    return ""
