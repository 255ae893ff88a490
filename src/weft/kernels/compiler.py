"""Compiles graphs with Inductor, and keeps the code in a folder of the user, for later runs and all ranks of a host."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft.errors import UserError
from weft.files import ABANDONED, cache_folder, locked, partial_path
from weft.kernels.processor import cpuinfo
from weft.kernels.torch_private import compile_graph, default_folder, forget_compiled_code

LIMIT = 2 << 30  # bytes of the user's folder; the graphs of one shape take about 2 MB
FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # the environment variable in which Inductor finds the folder of its cache
log = logging.getLogger("weft")
_EMPTIED: set[Path] = set()


def compiled(function: Callable, *, dynamic: bool | None = None, options: dict[str, Any] | None = None) -> Callable:
    """Returns `torch.compile(function)`, which keeps its code in the user's cache.

    Args:
        dynamic: as in `torch.compile`.
        options: Inductor's options.
    """
    use_user_cache()
    return torch.compile(function, dynamic=dynamic, options=options or None, backend=compile_once)


def use_user_cache() -> None:
    """Makes Inductor keep compiled code in the user's cache folder, unless TORCHINDUCTOR_CACHE_DIR is set.

    Inductor's default is a folder for temporary files, which does not outlive a restart of the machine. The folder is
    another one for each version of PyTorch and each kind of processor, because hosts can share a home directory. If it
    cannot be written, Inductor's default stays. The folders of all versions together keep at most LIMIT bytes.

    Raises:
        UserError: the folder of TORCHINDUCTOR_CACHE_DIR cannot be written.
    """
    if (own := os.environ.get(FOLDER, default_folder())) != default_folder():  # torch._dynamo sets it to the default
        with suppress(OSError):
            os.makedirs(own, exist_ok=True)
        if not os.access(own, os.W_OK):
            error = UserError(f"{FOLDER}: {own} cannot be written; set another folder, or unset the variable")
            error.quiet = os.environ.get("LOCAL_RANK", "0") != "0"  # the first rank of the host prints it
            raise error
        return
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        folder = cache_folder() / "compiled" / f"torch-{torch.__version__}-{_processor()}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            os.environ[FOLDER] = str(folder)
            limit_size(folder.parent)


def limit_size(root: Path, limit: int = LIMIT) -> None:
    """Deletes the least recently used files below `root` if they exceed `limit` bytes, until 3/4 of it are left.

    A file was used when it was last read (as far as the file system records that) or written. Files used in the last
    hour stay, because a process can be about to load them. Inductor compiles again what it misses.
    """
    files = []
    for path in root.rglob("*"):
        with suppress(OSError):  # another process deletes, too
            found = path.stat()
            if stat.S_ISREG(found.st_mode) and path.suffix != ".lock":
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    left, old = sum(size for _, size, _ in files), time.time() - ABANDONED
    if left <= limit:
        return
    for used, size, path in sorted(files):
        if left <= 3 * limit // 4 or used > old:
            break
        with suppress(OSError):
            path.unlink()
            left -= size


@cache
def _processor() -> str:
    """Returns a digest of the processor's instruction sets."""
    features = "".join(cpuinfo("flags", "Features")) or platform.processor()
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]


def compile_once(graph: torch.fx.GraphModule, inputs: list[Any], *, options: dict[str, Any] | None = None) -> Any:
    """Compiles a graph, as a backend of `torch.compile`. Of the processes of a host, one compiles, the others wait.

    No collective runs while a process compiles, so no process waits for one that waits for it. If compiling fails, the
    graph is compiled again. Unless a signal stopped the C++ compiler, code in the cache may be damaged, or the compiler
    be too old for the processor: the cache is emptied first, and from then on, all processes test the vector
    instructions and use the compiler's own linker, which takes seconds. A folder that the user chose is left as it is:
    its subfolder `weft/again` takes its place for the rest of the process.
    """
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    careful = folder is None or (folder / "weft" / "failed").exists()
    with ExitStack() as lock:
        if folder is not None:
            with suppress(OSError):
                (folder / "weft").mkdir(parents=True, exist_ok=True)
                lock.enter_context(locked(folder / "weft" / f"{_digest(graph, inputs)}.lock"))
        try:
            return compile_graph(graph, inputs, options or {}, careful=careful)
        except Exception as error:
            if folder is None:
                raise
            if not _stopped(error):
                careful, again = True, _empty(folder) if _own(folder) else _beside(folder)
                if again is None:
                    raise
                with suppress(OSError):
                    (again / "weft").mkdir(parents=True, exist_ok=True)
                    (again / "weft" / "failed").touch()
                first = str(error).strip().splitlines() or [type(error).__name__]
                log.warning("compiling failed, and starts again with an empty cache in %s: %s", again, first[0])
        forget_compiled_code()
        return compile_graph(graph, inputs, options or {}, careful=careful)


def _stopped(error: BaseException | None) -> bool:
    """Whether a signal stopped the C++ compiler: Ctrl-C reaches it, too, while Weft itself ends its step first.

    g++ itself ends with 1 if a program that it started was killed, such as by a kernel that is out of memory.
    """
    while error is not None:
        if isinstance(error, subprocess.CalledProcessError):
            killed = b"Killed signal terminated program" in (error.output or b"")
            return killed or -error.returncode in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
        error = error.__cause__ or error.__context__
    return False


def _digest(graph: torch.fx.GraphModule, inputs: list[Any]) -> str:
    """Returns a digest of a graph and of the shapes of its inputs, equal in all processes."""
    shapes = [str((x.shape, x.stride(), x.dtype, x.device.type) if torch.is_tensor(x) else x) for x in inputs]
    return hashlib.sha256(f"{graph.code} {shapes}".encode()).hexdigest()[:20]


def _own(folder: Path) -> bool:
    """Whether a cache folder is one that Weft or Inductor chose, not the user."""
    with suppress(RuntimeError):  # there is no home directory
        if folder.parent == cache_folder() / "compiled":
            return True
    return str(folder) == default_folder()


def _beside(folder: Path) -> Path | None:
    """Makes Inductor use the subfolder `weft/again` of a cache folder. Returns it; None if it is used already."""
    again = folder / "weft" / "again"
    if folder.parts[-2:] == again.parts[-2:]:
        return None
    os.environ[FOLDER] = str(again)
    return again


def _empty(folder: Path) -> Path | None:
    """Empties a cache folder, once per process. Returns it; None if that was done before, or is not possible."""
    if folder in _EMPTIED:
        return None
    _EMPTIED.add(folder)
    old = partial_path(folder, f"damaged-{os.getpid()}")
    try:
        os.replace(folder, old)  # a new folder: others that compile into the old one fail, and start again, too
        shutil.rmtree(old, ignore_errors=True)  # first, because the disk may be full
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder
