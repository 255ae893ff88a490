"""Processes of tests that take no seconds to start: each is forked from one that has imported everything.

A test of a process that is killed, or that gets signals, needs a process of its own, but no new interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "parallel"))

from pool import ENVIRONMENT, IMPORTS, _die_with_session, _environ, _no_measuring


class Forked:
    """A process in a session of its own, with the attributes of `subprocess.Popen` that tests use.

    Args:
        words: the arguments, of `weft` or of `program`.
        program: Python code to run as `python -c` does; None: the command `weft`.
        environment: variables to set, beside those of this process.
    """

    def __init__(self, *words: str | Path, cwd: Path | str = ".", program: str | None = None, **environment: str):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["forked", *IMPORTS])
        self.folder = tempfile.TemporaryDirectory(prefix="weft-forked-")
        files = [str(Path(self.folder.name) / name) for name in ("stdout", "stderr")]
        given = (
            program,
            [str(word) for word in words],
            os.path.abspath(cwd),
            dict(os.environ) | ENVIRONMENT | environment,
            files,
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


def _be(program: str | None, words: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> None:
    """In the new process: run the program."""
    threading.Thread(target=_die_with_session, daemon=True).start()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(cwd)
    sys.path.insert(0, "")
    sys.argv = ["weft" if program is None else "-c", *words]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _no_measuring()
    if program is None:
        from weft.cli.main import main

        sys.exit(main(words))
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
