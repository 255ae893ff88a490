"""Processes that wait to be ranks: started once, warm, and used for one case after the other.

A rank costs two seconds of imports, and 16 of them much memory. So one process imports (multiprocessing's fork server),
and the ranks are forked from it. They die with the process that made the pool, however that ends: the fork server then
ends by itself, and the kernel kills its children.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What a run imports, some of it only when it gets there.
IMPORTS = ("weft.train.trainer", "weft.optim.adamw", "weft.objectives.pretrain", "weft.optim.schedules.constant")
# Inductor would start processes of its own, a dozen for each rank.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
MOST = 16
GRACE = 3.0  # seconds for the other ranks to say what they know, once one of them has failed


class RanksFailed(AssertionError):
    """What the ranks of a case said, or where they stood when their time was up."""


class Pool:
    """Calls functions in processes that see themselves as ranks of a job, with torchrun's environment.

    Every case has process groups and a store of its own, whose port the system chooses. After a case that failed all
    processes are new.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-pool-"))
        self.workers: list[tuple[multiprocessing.Process, Connection]] = []

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
        self._start(ranks)
        self.workers[0][1].send(({}, open_store, ()))
        answers = self._answers(1, seconds)
        if answers.get(0, (False,))[0]:
            port = answers[0][1]
            for rank, (_, pipe) in enumerate(self.workers[:ranks]):
                pipe.send((_environment(rank, ranks, port), function, arguments))
            answers = self._answers(ranks, seconds)
        if all(good for good, _ in answers.values()) and len(answers) == ranks:
            return [answers[rank][1] for rank in range(ranks)]
        text = self._account(answers, ranks, seconds)
        self.close()
        raise RanksFailed(text)

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        for _, pipe in self.workers:
            pipe.close()  # whoever waits there ends by itself
        end = time.monotonic() + 1
        for process, _ in self.workers:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()
        self.workers = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, ranks: int) -> None:
        if ranks > MOST:
            raise ValueError(f"{ranks} ranks; the pool has at most {MOST} processes")
        self.folder.mkdir(exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        new = range(len(self.workers), ranks)
        with _environ(**ENVIRONMENT):
            context.set_forkserver_preload([__name__ if __name__ != "__main__" else "pool", *IMPORTS])
            for number in new:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, number, self.folder), daemon=True)
                process.start()
                theirs.close()
                self.workers.append((process, ours))
        for number in new:
            try:
                self.workers[number][1].recv()  # ready
            except EOFError:
                text = f"process {number} did not start: {self._said(number)}"
                self.close()
                raise RanksFailed(text) from None

    def _answers(self, ranks: int, seconds: float) -> dict[int, tuple[bool, Any]]:
        """What each rank answered: whether it went well, and the result or a traceback. Some may be missing."""
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + seconds
        while len(answers) < ranks and (left := end - time.monotonic()) > 0:
            pipes = {self.workers[rank][1]: rank for rank in range(ranks) if rank not in answers}
            for pipe in wait(pipes, timeout=left):
                rank = pipes[pipe]
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    process = self.workers[rank][0]
                    process.join()
                    answers[rank] = (False, f"died with exit code {process.exitcode}\n{self._said(rank)}")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _account(self, answers: dict[int, tuple[bool, Any]], ranks: int, seconds: float) -> str:
        """One text of all that went wrong; equal texts once."""
        missing = [rank for rank in range(ranks) if rank not in answers]
        for rank in missing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank][0].pid or 0, signal.SIGUSR1)
        if missing:
            time.sleep(0.5)
        texts: dict[str, list[int]] = {}
        for rank, (good, text) in sorted(answers.items()):
            if not good:
                texts.setdefault(text, []).append(rank)
        failed = bool(texts)
        for rank in missing:
            stack = (self.folder / f"stack-{rank}").read_text(errors="replace").strip()
            texts.setdefault(f"was still here:\n{stack}", []).append(rank)
        head = f"{ranks} ranks" + ("" if failed else f" were not done after {seconds:g} s")
        return "\n".join([head, *(f"--- rank {', '.join(map(str, who))}: {text}" for text, who in texts.items())])

    def _said(self, rank: int) -> str:
        """The last words of a process on its standard error."""
        return (self.folder / f"log-{rank}").read_text(errors="replace")[-3000:]


def fit(file: Path, fresh: bool) -> None:
    """Train what a file says."""
    from weft.config.run import RunConfig
    from weft.train.trainer import Trainer

    Trainer(RunConfig.load(file), fresh=fresh).fit()


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's, with the pool's store in the place of the agent's; none for a process alone."""
    if ranks == 1:
        return {}
    return {
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

_stores: list[Any] = []


def _serve(pipe: Connection, number: int, folder: Path) -> None:
    """Be a rank whenever asked, until the pipe is closed."""
    _die_with_parent()
    log = os.open(folder / f"log-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = (folder / f"stack-{number}").open("w")
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    for module in IMPORTS:
        importlib.import_module(module)
    _no_measuring()
    gc.freeze()  # what was imported is never garbage: looking through it takes longer than a small model's step
    pipe.send("ready")
    own = dict(os.environ)
    while True:
        try:
            environment, function, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ.clear()
        os.environ.update(own | environment)
        pipe.send(_answer(function, arguments))


def open_store() -> int:
    """Keep the store of the next case, in place of the last one's; its port."""
    from torch.distributed import TCPStore

    _stores[:] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    return _stores[0].port


def _answer(function: Callable[..., Any], arguments: tuple) -> tuple[bool, Any]:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        return True, function(*arguments)
    except BaseException:
        return False, traceback.format_exc()
    finally:
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        gc.collect()


def _die_with_parent() -> None:
    """Have the kernel end this process when the fork server is gone."""
    if sys.platform.startswith("linux"):
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _no_measuring() -> None:
    """A run begins with half a second in which the device's peak is measured, for the MFU: here it is made up."""
    from weft.observe.flops import Peak
    from weft.train import recorder

    recorder.device_peak = lambda device, dtype: Peak(1e12, "made up by a test")
