"""Ranks for tests: processes that are forked, for each case anew, from one that has imported everything.

A process of its own would spend seconds with imports, and 16 of them much memory. One that is used for another case
remembers too much: PyTorch's caches of sharded operations know the process groups of the case before. Ranks die with
the process that asked for them, however that ends, and the fork server when there is nobody left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What a run imports, some of it only when it gets there.
IMPORTS = (
    "weft.train.trainer",
    "weft.objectives.sft",
    "weft.optim.schedules.constant",
    "jinja2",
    "psutil",
    "ruamel.yaml",
    "warm",
)
# Inductor would start processes of its own, a dozen for each rank.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
MOST = 16
GRACE = 3.0  # seconds for the other ranks to say what they know, once one of them has failed


class RanksFailed(AssertionError):
    """What the ranks of a case said, or where they stood when their time was up."""


class Pool:
    """Calls functions in processes that see themselves as ranks of a job, with torchrun's environment.

    Each case has a store of its own, whose port the system chooses.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-pool-"))

    def close(self) -> None:
        """Remove what ranks said."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, file: Path, ranks: int, *, fresh: bool = False, seconds: float = 60) -> None:
        """`Trainer(RunConfig.load(file)).fit()` in `ranks` processes, or in one that knows of no others.

        Raises:
            RanksFailed: any of them raised, died or took longer than `seconds`.
        """
        self.call(fit, ranks, file, fresh, seconds=seconds)

    def call(self, function: Callable[..., Any], ranks: int, *arguments: Any, seconds: float = 60) -> list[Any]:
        """`function(*arguments)` in `ranks` processes; what each returned. It is named by its module, like a pickle.

        Raises:
            RanksFailed: any of them raised, died or took longer than `seconds`.
        """
        if ranks > MOST:
            raise ValueError(f"{ranks} ranks; at most {MOST} are started")
        with self._processes(ranks) as case:
            end = time.monotonic() + seconds
            answers = case.answers([0], end)  # the port of the store that the first rank keeps
            if answers.get(0, (False,))[0]:
                case.send([(_environment(rank, ranks, answers[0][1]), function, arguments) for rank in range(ranks)])
                answers = case.answers(range(ranks), end)
            if len(answers) == ranks and all(good for good, _ in answers.values()):
                return [answers[rank][1] for rank in range(ranks)]
            raise RanksFailed(case.account(answers, seconds))

    @contextlib.contextmanager
    def _processes(self, ranks: int):
        context = multiprocessing.get_context("forkserver")
        # By its file's name, also where the file itself is what Python was started with.
        context.set_forkserver_preload([Path(__file__).stem, *IMPORTS])
        case = _Case(self.folder, [], [])
        try:
            # Here the fork server finds this file and `warm`: it is told our sys.path, and does not use it.
            paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
            with _environ(PYTHONPATH=paths, **ENVIRONMENT):
                for rank in range(ranks):
                    ours, theirs = context.Pipe()
                    case.processes.append(context.Process(target=_be, args=(theirs, rank, self.folder), daemon=True))
                    case.pipes.append(ours)
                    case.processes[-1].start()
                    theirs.close()
            yield case
        finally:
            case.end()


class _Case:
    """The processes of one call, their pipes, and the folder with what they say."""

    def __init__(self, folder: Path, processes: list, pipes: list[Connection]):
        self.folder, self.processes, self.pipes = folder, processes, pipes

    def send(self, messages: list[Any]) -> None:
        for pipe, message in zip(self.pipes, messages, strict=True):
            with contextlib.suppress(BrokenPipeError):  # it is gone: its answer will say so
                pipe.send(message)

    def answers(self, ranks: Iterable[int], end: float) -> dict[int, tuple[bool, Any]]:
        """What each rank answers: whether it went well, and the result or a traceback. Late ones are missing."""
        waiting = {self.pipes[rank]: rank for rank in ranks}
        found: dict[int, tuple[bool, Any]] = {}
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(waiting, timeout=left):
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join()
                    found[rank] = (False, f"died with exit code {self.processes[rank].exitcode}\n{self._log(rank)}")
                if not found[rank][0]:
                    end = min(end, time.monotonic() + GRACE)
        return found

    def account(self, answers: dict[int, tuple[bool, Any]], seconds: float) -> str:
        """One text of all that went wrong: the first failure whole, of others the last line; and where the rest is."""
        missing = [rank for rank in range(len(self.processes)) if rank not in answers]
        for rank in missing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if missing:
            time.sleep(0.5)
        failed = {rank: text.strip() for rank, (good, text) in sorted(answers.items()) if not good}
        parts = [f"{len(self.processes)} ranks" + ("" if failed else f" were not done after {seconds:g} s")]
        if failed:
            first, *others = failed
            parts.append(f"--- rank {first}: {failed[first]}")
            parts += _together({rank: failed[rank].splitlines()[-1] for rank in others})
        files = {rank: self.folder / f"stack-{rank}" for rank in missing}
        stacks = {
            rank: file.read_text(errors="replace").strip() if file.exists() else "no stack: it died before it began"
            for rank, file in files.items()
        }
        return "\n".join(parts + _together({rank: f"was still here:\n{stack}" for rank, stack in stacks.items()}))

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # whoever waits there ends by itself
        end = time.monotonic() + 1
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()

    def _log(self, rank: int) -> str:
        """The last words of a process on its standard error."""
        return (self.folder / f"log-{rank}").read_text(errors="replace")[-3000:]


def _together(texts: dict[int, str]) -> list[str]:
    """Equal texts once; addresses and numbers of process groups make no difference."""
    found: dict[str, tuple[list[int], str]] = {}
    for rank, text in texts.items():
        found.setdefault(re.sub(r"\d+", "0", text), ([], text))[0].append(rank)
    return [f"--- rank {', '.join(map(str, ranks))}: {text}" for ranks, text in found.values()]


def fit(file: Path, fresh: bool) -> None:
    """Train what a file says."""
    from weft.config.run import RunConfig
    from weft.train.trainer import Trainer

    Trainer(RunConfig.load(file), fresh=fresh).fit()


def weft_command(folder: Path, words: list[str]) -> tuple[int, str]:
    """The exit code and stderr of `weft` in a folder."""
    from weft.cli.main import main

    os.chdir(folder)
    sys.path.insert(0, "")
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    return code, errors.getvalue()


def run_program(folder: Path, file: str) -> str:
    """What a program in a folder wrote to stderr."""
    os.chdir(folder)
    sys.path.insert(0, "")
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        runpy.run_path(file, run_name="__main__")
    return errors.getvalue()


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's, with our store in the place of its agent's; none for a process alone. And the cache of the test:
    the processes begin with the environment of the test that was the first to start any.
    """
    cache = {key: os.environ[key] for key in ("WEFT_CACHE",) if key in os.environ}
    if ranks == 1:
        return cache
    return cache | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextlib.contextmanager
def _environ(**values: str):
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


# ---- in the processes


def _be(pipe: Connection, rank: int, folder: Path) -> None:
    """Be a rank: do what the pipe says, and tell it what came of it."""
    threading.Thread(target=_die_with_session, daemon=True).start()
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    try:
        import torch
        from torch.distributed import TCPStore

        no_measuring()
        tempfile.tempdir = None  # the fork server may have looked for it, in another test's environment
        torch.manual_seed(0)
        torch.set_num_threads(1)
        if rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            pipe.send((True, store.port))
        environment, function, arguments = pipe.recv()
        os.environ.update(environment)
        pipe.send((True, function(*arguments)))
        pipe.recv()  # until the others are done: the store is here
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _die_with_session() -> None:
    """Wait for the end of the process that asked for this one."""
    session = multiprocessing.parent_process()
    if session is not None:
        session.join()
        os.kill(os.getpid(), signal.SIGKILL)


def no_measuring() -> None:
    """Before a run's first step, the device's peak is measured, for the MFU, and git looks at each file of the
    repository: here both are made up. And nothing waits for the disk (`conftest.py`).
    """
    from weft.observe import manifest
    from weft.observe.flops import Peak
    from weft.train import recorder

    os.fsync = lambda file: None
    manifest.git_state = lambda: {"commit": "made up by a test", "dirty": False}
    recorder.device_peak = lambda device, dtype: Peak(1e12, "made up by a test")
