"""Compiles and loads the C sources in `native/`, whose functions run on CPUs.

The sources need no headers of PyTorch, so that a C compiler builds each in seconds. Libraries are kept in the user's
cache directory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from weft.kernels.processor import cpuinfo

SOURCES = Path(__file__).parent / "native"
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math"]


def load_library(name: str, *flags: str, wait: bool = True) -> ctypes.CDLL | None:
    """Returns the library of a C source. The first call starts the compiler in another thread, if necessary.

    Args:
        name: name of the source in `native/`, without its suffix.
        flags: flags of the compiler besides FLAGS.
        wait: whether to wait for the compiler. If False, the result is None until the compiler has finished.

    Raises:
        OSError: there is no C compiler, the compiler failed, or the library cannot be written or loaded. The message
            has one line.
    """
    future = _start(name, flags)
    return future.result() if wait or future.done() else None


@cache
def _start(name: str, flags: tuple[str, ...]) -> Future[ctypes.CDLL]:
    future: Future[ctypes.CDLL] = Future()

    def run() -> None:
        try:
            future.set_result(_load(name, flags))
        except OSError as error:
            future.set_exception(error)

    try:
        compiled = _path(name, flags, _compiler()).exists()
    except OSError:
        compiled = True  # fails again in `run`
    run() if compiled else threading.Thread(target=run, daemon=True).start()
    return future


def _compiler() -> str:
    for name in (os.environ.get("CC") or "cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return found
    raise OSError("there is no C compiler; install gcc or clang")


@cache
def _path(name: str, flags: tuple[str, ...], compiler: str) -> Path:
    """Returns the path of the library, which depends on the sources, the flags, the compiler and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(version + " ".join([*FLAGS, *flags]).encode() + platform.machine().encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(("".join(cpuinfo("flags", "Features")) or platform.processor()).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "kernels"
    return folder / f"{name}-{digest.hexdigest()[:20]}.so"


def _load(name: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    compiler, source = _compiler(), SOURCES / f"{name}.c"
    path = _path(name, flags, compiler)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            command = [compiler, *FLAGS, *flags, "-o", str(new), str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
                raise OSError(f"{compiler} cannot compile {source}: {first}")
            os.replace(new, path)  # atomic, for other processes that compile it too
    return ctypes.CDLL(str(path))  # its calls release the GIL
