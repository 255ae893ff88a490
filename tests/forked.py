"""Processes of tests that take no seconds to start: each is forked from one that has imported everything.

A test of a process that is killed, or that gets signals, needs a process of its own, but no new interpreter.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, NoReturn

sys.path.append(str(Path(__file__).parent / "parallel"))

from pool import ENVIRONMENT, IMPORTS, _die_with_session, _environ, no_measuring


class Forked:
    """A process in a session of its own, with the attributes of `subprocess.Popen` that tests use.

    Args:
        words: the arguments, of `weft` or of `program`.
        program: Python code to run as `python -c` does; None: the command `weft`.
        ranks: whether the ranks that the process launches are forked from it, too (`Child`).
        environment: variables to set, beside those of this process.
    """

    def __init__(
        self,
        *words: str | Path,
        cwd: Path | str = ".",
        program: str | None = None,
        ranks: bool = False,
        **environment: str,
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["forked", *IMPORTS])
        self.folder = tempfile.TemporaryDirectory(prefix="weft-forked-")
        files = [str(Path(self.folder.name) / name) for name in ("stdout", "stderr")]
        given = (
            program,
            ranks,
            [str(word) for word in words],
            os.path.abspath(cwd),
            dict(os.environ) | ENVIRONMENT | environment,
            files,
            multiprocessing.get_start_method(),
        )
        with _environ(**ENVIRONMENT):
            self.process = context.Process(target=_be, args=given)
            self.process.start()
        assert self.process.pid is not None
        self.pid, self.files = self.process.pid, files

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    @property
    def stderr(self) -> str:
        """What was written to stderr until now."""
        return Path(self.files[1]).read_text() if Path(self.files[1]).exists() else ""

    def first_line(self, timeout: float = 60) -> str:
        """Waits for the first line on stdout. Returns an empty text if the process ends or takes too long."""
        end = time.monotonic() + timeout
        while "\n" not in (text := Path(self.files[0]).read_text() if Path(self.files[0]).exists() else ""):
            if self.poll() is not None or time.monotonic() > end:
                return ""
            time.sleep(0.02)
        return text.partition("\n")[0]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end, and returns what was written to stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: the process has not ended.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        stdout, stderr = (Path(file).read_text() for file in self.files)
        return stdout, stderr


def run(*words: str | Path, timeout: float = 90, **options) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with `capture_output` and `text`, in a `Forked`."""
    process = Forked(*words, **options)
    try:
        stdout, stderr = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(words, process.returncode or 0, stdout, stderr)


def _be(
    program: str | None,
    ranks: bool,
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    files: list[str],
    method: str,
) -> None:
    """In the new process: run the program."""
    threading.Thread(target=_die_with_session, daemon=True).start()
    multiprocessing.set_start_method(method, force=True)  # else it would be "forkserver", which imports all again
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the fork server may have looked for it, in another test's environment
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    sys.path.insert(0, "")
    _default_signals()
    no_measuring()
    if ranks:
        _fork_ranks()
    _run(["-m", "weft", *words] if program is None else ["-c", program, *words])


def _run(command: Sequence[str]) -> None:
    """What an interpreter does with `-m MODULE WORD ...` or `-c PROGRAM WORD ...`."""
    how, name, *words = command
    sys.argv = ["weft" if name == "weft" else "-c", *words]
    if (how, name) == ("-m", "weft"):
        from weft.cli.main import main

        sys.exit(main(words))
    if how == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})


# ---- processes that such a process starts


class Child:
    """A process with the attributes of `subprocess.Popen` that the launcher uses: a fork, and no new interpreter.

    What this process has imported is not imported again, which takes each rank of a run seconds. What a new interpreter
    would not have is gone: descriptors, handlers of signals. But /proc shows another command line and environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str],
        pass_fds: Sequence[int] = (),
        stderr: int | None = None,
        start_new_session: bool = False,
    ):
        assert (command[0], command[1]) == (sys.executable, "-m"), command
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(lambda: self._set_up(command, env, pass_fds, stderr, start_new_session))

    def _set_up(self, command, env, pass_fds, stderr, start_new_session) -> Sequence[str]:
        """In the new process: what an interpreter would find. Returns the command."""
        if start_new_session:
            os.setsid()
        if stderr is not None:
            os.dup2(stderr, 2)
            sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in _AT_START and number not in pass_fds:
                with contextlib.suppress(OSError):
                    os.close(number)
        os.environ.clear()
        os.environ.update(env)
        return command

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Prepared(Child):
    """A `Child` that is forked before it is known what it will run: a rank in the middle of a job has threads."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        reading, self.writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(lambda: self._told(reading))
        os.close(reading)

    def _told(self, reading: int) -> Sequence[str]:
        """In the new process: waits for the command and returns it."""
        os.close(self.writing)
        command, environment, errors = json.loads(os.fdopen(reading).read())
        os.dup2(os.open(errors, os.O_WRONLY), 2)
        os.environ.clear()
        os.environ.update(environment)
        return command

    def start(self, command: Sequence[str], env: dict[str, str], stdout: int, stderr: IO) -> Prepared:
        """Runs a command, as `subprocess.Popen` does."""
        with os.fdopen(self.writing, "w") as pipe:
            json.dump([command, env, stderr.name], pipe)
        return self


def _be_child(set_up: Callable[[], Sequence[str]]) -> NoReturn:
    """In a new process: run the command that `set_up` returns, and end as an interpreter would."""
    code = 1
    try:
        command = set_up()
        _default_signals()
        _run(command[1:])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def weft_with_one_trial(folder: Path, words: list[str]) -> tuple[int, str]:
    """On each rank: `weft` with words, and one trial of sizes of micro-batches without a new interpreter."""
    from pool import weft_command

    from weft.train import micro_batch

    os.chdir(folder)
    sys.path.insert(0, "")
    micro_batch.subprocess = SimpleNamespace(Popen=Prepared().start, DEVNULL=subprocess.DEVNULL)
    return weft_command(folder, words)


_AT_START: set[int] = set()  # descriptors that a process has because it was forked


def _fork_ranks() -> None:
    """From now on, the launcher forks its ranks from this process."""
    from weft.launch import rank

    _AT_START.update(map(int, os.listdir("/proc/self/fd")))
    rank.subprocess = SimpleNamespace(Popen=Child)


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
