"""`manifest.json`: all that is needed to run a run again: versions, commit, command, hardware, seed, data, choices."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import weft
from weft.errors import UserError
from weft.files import replace_file

MANIFEST = "manifest.json"
PACKAGES = ("torch", "numpy", "tokenizers", "gigatoken", "safetensors", "pydantic", "triton", "transformers")


def write_manifest(run_directory: str | Path, config: Any, *, resumed_step: int = 0, **facts: Any) -> Path:
    """Begin a session in the run's manifest (atomically). The first rank calls it when training begins or goes on.

    The top of the file tells what holds now; `sessions` has one entry for each time that the run was started: when,
    from which step, by which command, code, versions and hardware.

    Args:
        config: the `RunConfig`, or its `as_dict()`; name, seed, dtype and threads are noted (all is in `config.yaml`).
        resumed_step: updates made before this session.
        facts: whatever else is known, as JSON: ranks, mesh, steps, data_digests, parameters, matmul_parameters,
            flops_per_token, peak_flops_per_second (of all devices), peak_origin, memory_kind ...

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(run_directory) / MANIFEST
    config = config if isinstance(config, dict) else config.as_dict()
    sessions = read_manifest(run_directory).get("sessions", [])
    command = [Path(sys.argv[0]).name or "python", *sys.argv[1:]]
    session = {
        "started": now(),
        "step": resumed_step,
        "command": shlex.join(command),
        "working_directory": os.getcwd(),
        "git": git_state(),
        "versions": versions(),
        "hardware": hardware(),
        "ranks": facts.get("ranks", 1),
    }
    manifest = {
        "name": config["run"].get("name") or Path(run_directory).name,
        "seed": config["run"].get("seed"),
        "dtype": config.get("training", {}).get("dtype"),
        "threads": config.get("training", {}).get("threads"),
        "started": sessions[0]["started"] if sessions else session["started"],
        **{key: session[key] for key in ("command", "working_directory", "git", "versions", "hardware", "ranks")},
        **facts,
        "sessions": [*sessions, session],
    }
    return _write(path, manifest)


def end_session(run_directory: str | Path, *, status: str, step: int, **facts: float) -> Path:
    """Note how and when the newest session ended ("finished", "stopped", "non-finite"), after `step` updates in all.

    Args:
        facts: what else is known of it: warmup_seconds (its first step), steady_step_seconds (mean of the others).
    """
    manifest = read_manifest(run_directory)
    if manifest.get("sessions"):
        manifest["sessions"][-1].update(ended=now(), status=status, last_step=step, **facts)
    return _write(Path(run_directory) / MANIFEST, manifest)


def read_manifest(run_directory: str | Path) -> dict[str, Any]:
    """The manifest as written; empty if there is none.

    Raises:
        UserError: it is damaged.
    """
    path = Path(run_directory) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"cannot be read ({error}); mend it, or move it away", path) from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sessions", []), list):
        raise UserError("is not a run's manifest; move it away", path)
    return manifest


def now() -> str:
    """This moment, local time with its offset, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of Weft, Python, and the packages that numbers depend on."""
    found = {"weft": weft.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_state(directory: str | Path = ".") -> dict[str, Any] | None:
    """Commit and whether files differ from it, of the working directory; None outside a repository or without git."""

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
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def hardware() -> dict[str, Any]:
    """Of this host: CPU model, cores (of the machine; those this process may use), memory in bytes, GPUs."""
    import psutil
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": usable,
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [],
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda or torch.version.hip
    return facts


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("model name", "Model")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _write(path: Path, manifest: dict[str, Any]) -> Path:
    content = json.dumps(manifest, indent=2, ensure_ascii=False, default=str) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.encode("utf-8", "replace"))
    except OSError as error:
        what = f"cannot be written: {error.strerror}; mend that and run the same command to go on"
        raise UserError(what, path) from error
    return path
