"""Writes `manifest.json`: what is needed to repeat a run (versions, commit, command, hardware, seed, data, mesh)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import weft
from weft import processes
from weft.errors import UserError
from weft.files import replace_file, report_write_errors
from weft.formatting import flat, without_secrets
from weft.processes import usable_cores

MANIFEST = "manifest.json"
# Variables that change how GPUs and NCCL compute or use memory. No others are recorded: they can be secret.
ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
PACKAGES = ("torch", "numpy", "tokenizers", "gigatoken", "safetensors", "pydantic", "triton", "transformers")


def write_manifest(run_directory: str | Path, config: Any, *, resumed_step: int = 0, **facts: Any) -> Path:
    """Adds a session to the manifest of a run (atomically). The first rank calls this when training starts or resumes.

    The top level of the manifest has the current values. `sessions` has one entry for each start of the run: time,
    step, command, code, versions, hardware, mesh, data, and the changes of the config that affect results.

    Args:
        config: the `RunConfig`, or its `as_dict()`. The manifest contains only name, seed, dtype, threads and
            determinism; `config.yaml` contains all keys.
        resumed_step: number of updates before this session.
        facts: further JSON values: ranks, mesh, steps, data_digests, changes, parameters, matmul_parameters,
            flops_per_token, peak_flops_per_second (of all devices), peak_origin, memory_kind, ...

    Raises:
        UserError: the file cannot be written.
    """
    config = config if isinstance(config, dict) else config.as_dict()
    run, training = config["run"], config.get("training", {})
    sessions = read_manifest(run_directory).get("sessions", [])
    current = {
        "command": _command(),
        "working_directory": os.getcwd(),
        "git": git_state(),
        "code": custom_code(config),
        "versions": versions(),
        "hardware": hardware(),
        "ranks": facts.get("ranks", 1),
    }
    names = (*ENVIRONMENT, *config.get("parallel", {}).get("nccl", {}))
    if environment := {name: os.environ[name] for name in names if name in os.environ}:
        current["environment"] = environment
    chosen = {key: training.get(key) for key in ("dtype", "threads", "determinism")}
    of_session = {key: facts[key] for key in ("mesh", "data_digests", "changes") if facts.get(key)}
    session = {"started": now(), "step": resumed_step, **current, **chosen, **of_session}
    facts.pop("changes", None)
    manifest = {
        "name": run.get("name") or Path(run_directory).name,
        "seed": run.get("seed"),
        **chosen,
        "started": sessions[0]["started"] if sessions else session["started"],
        **current,
        **facts,
        "sessions": [*sessions, session],
    }
    return _write(run_directory, manifest)


def ended_at(run_directory: str | Path) -> int | None:
    """Returns the step at which the last session of a run ended; None if it was killed, or there was none."""
    sessions = read_manifest(run_directory).get("sessions", [])
    return sessions[-1].get("last_step") if sessions else None


def end_session(run_directory: str | Path, *, status: str, step: int, **facts: float) -> Path:
    """Records the time and status of the end of the last session in the manifest.

    Args:
        status: "finished", "stopped", "stopped-early", "non-finite", "spike" or "corruption".
        step: number of updates of all sessions.
        facts: warmup_seconds (duration of the session's first step) and steady_step_seconds (mean duration of its later
            steps), if known.
    """
    manifest = read_manifest(run_directory)
    if manifest.get("sessions"):
        manifest["sessions"][-1].update(ended=now(), status=status, last_step=step, **facts)
    return _write(run_directory, manifest)


def read_manifest(run_directory: str | Path) -> dict[str, Any]:
    """Returns the manifest of a run; an empty dict if the run has no manifest.

    Raises:
        UserError: the file cannot be read, or is not a manifest.
    """
    path = Path(run_directory) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"cannot be read ({error}); correct the file, or move it away", path) from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sessions", []), list):
        raise UserError("not the manifest of a run; move the file away", path)
    return manifest


def check_run_directory(run: Path) -> dict[str, Any]:
    """Returns the manifest of a run. Raises UserError if the directory is not that of a run."""
    manifest = read_manifest(run)
    if not manifest or not (run / "config.yaml").is_file():
        raise UserError(f"not a run directory: it needs {MANIFEST} and config.yaml; give the directory of a run", run)
    return manifest


def now() -> str:
    """Returns the local time with its UTC offset, to the second."""
    return local_time(time.time())


def _command() -> str:
    """Returns the command of the run, without secrets. For a rank, it is the command that started the launcher."""
    program, *words = shlex.split(processes.launched_by) or sys.argv
    path = Path(program)  # `__main__.py` of the package, for `python -m weft`
    return shlex.join([(path.parent if path.name == "__main__.py" else path).name or "python", *without_secrets(words)])


def local_time(seconds: float) -> str:
    """Returns a time, in seconds since the epoch, as local time with its UTC offset, to the second."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Returns the versions of Weft, Python, and the packages that results depend on."""
    import torch

    found = {"weft": weft.__version__, "python": platform.python_version()}
    return found | _installed() | {"torch": torch.__version__}  # its build (such as +cu130), which a wheel's name lacks


@cache
def _installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_state(directory: str | Path = ".") -> dict[str, Any] | None:
    """Returns the commit of a working directory, and how tracked files differ from this commit.

    `dirty` is whether they differ, and `diff_sha256` the digest of the differences if they do.

    Returns None if the directory is not in a git repository, or git is not installed.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "--no-optional-locks", "-C", str(directory), *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = git("status", "--porcelain", "--untracked-files=no")
    state: dict[str, Any] = {"commit": commit, "dirty": None if changes is None else bool(changes)}
    if changes and (diff := git("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--binary")) is not None:
        state["diff_sha256"] = hashlib.sha256(diff.encode()).hexdigest()
    return state


def custom_code(config: dict[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of the source files of a config's custom classes and functions, by `module:Name`."""
    found = {}
    for value in flat(config).values():
        module = sys.modules.get(value.partition(":")[0]) if isinstance(value, str) and ":" in value else None
        if (file := getattr(module, "__file__", None)) is not None:
            with contextlib.suppress(OSError):
                found[value] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def hardware() -> dict[str, Any]:
    """Returns this host's CPU model, cores (all, and usable by this process), memory in bytes, and GPUs."""
    import psutil
    import torch

    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [],
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda or torch.version.hip
    return facts


def cpu_model() -> str:
    """Returns the name of this machine's CPU."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _write(run_directory: str | Path, manifest: dict[str, Any]) -> Path:
    path = Path(run_directory) / MANIFEST
    content = json.dumps(manifest, indent=2, ensure_ascii=False, default=str) + "\n"
    with report_write_errors(path, "correct the cause, then run the same command to resume"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.encode("utf-8", "replace"))
    return path
