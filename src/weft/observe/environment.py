"""Describes the environment (versions, devices, limits, extras) and checks it for known problems."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.version import Version

from weft.formatting import byte_size
from weft.observe.manifest import hardware, versions
from weft.plugins import load_reference
from weft.processes import cpp_compiler
from weft.torch_private import missing

DISTRIBUTION = "weft-train"
NEWEST_TORCH = "2.13"  # the newest version that Weft is tested with
SHARED_MEMORY = 1e9  # bytes; NCCL and data workers fail on Docker's default of 64 MB
OPEN_FILES = 4096
FREE_DISK = 10e9  # bytes: a few checkpoints of a small model
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "NCCL_DEBUG"),
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_JOB_ID"),
)


def environment() -> dict[str, dict[str, Any]]:
    """Returns the environment as section -> name -> value. Values are JSON types; sizes are bytes."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "memory and disk": _storage(),
        "interconnect": _interconnect(),
        "compilers": _compilers(),
        "extras": _extras(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _versions() -> dict[str, Any]:
    return versions() | {
        "torch built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else torch.version.hip or "CPU",
        "system": platform.platform(),
    }


def _devices() -> dict[str, Any]:
    facts = hardware()
    found: dict[str, Any] = {"cpu": facts["cpu"], "cores": facts["cores_usable"], "machine_cores": facts["cores"]}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        found[f"gpu {index}"] = f"{device.name}, {byte_size(device.total_memory)}, sm_{device.major}{device.minor}"
    found["nvidia_driver"] = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _storage() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    found = {"memory_bytes": memory.total, "memory_available_bytes": memory.available}
    folders = {"working directory": Path.cwd(), "temporary directory": Path(tempfile.gettempdir())}
    folders["shared memory"] = Path("/dev/shm")
    for name, folder in folders.items():
        if folder.is_dir():
            found[f"{name} free_bytes"] = shutil.disk_usage(folder).free
    try:
        import resource

        found["open files limit"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # not a Unix system
        pass
    return found


def _interconnect() -> dict[str, Any]:
    found: dict[str, Any] = {"backends": [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if _has(name)]}
    if torch.cuda.is_available():
        if _has("nccl"):
            from torch.cuda import nccl

            found["nccl"] = ".".join(map(str, nccl.version()))
        gpus = range(torch.cuda.device_count())
        pairs = [torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b]
        if pairs:
            found["GPU peer access"] = f"{sum(pairs)} of {len(pairs)} pairs"
    infiniband = Path("/sys/class/infiniband")
    found["infiniband"] = sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else []
    for name, state in psutil.net_if_stats().items():
        if state.isup and name != "lo":
            found[f"network {name}"] = f"{state.speed / 1000:g} Gbit/s" if state.speed else "up, speed unknown"
    return found


def _has(backend: str) -> bool:
    return getattr(dist, f"is_{backend}_available", bool)()


def _compilers() -> dict[str, Any]:
    from torch.utils.cpp_extension import CUDA_HOME

    compiler = cpp_compiler()
    found = {"c++": _first_line(compiler, "--version") if compiler else None}
    nvcc = shutil.which("nvcc") or (f"{CUDA_HOME}/bin/nvcc" if CUDA_HOME else None)
    found["nvcc"] = _first_line(nvcc, "--version", last=True) if nvcc else None
    found["triton"] = _version("triton")
    return found


def _extras() -> dict[str, Any]:
    """Maps each extra of the package to "installed" or to a text that lists its unmet requirements."""
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    required = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    found = {}
    for extra in metadata.get_all("Provides-Extra") or []:
        unmet = []
        for requirement in required:
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                version = _version(requirement.name)
                if not _satisfies(version, requirement):
                    unmet.append(f"{requirement.name}{requirement.specifier} (found {version or 'none'})")
        found[extra] = "installed" if not unmet else f"needs {', '.join(unmet)}"
    return found | {"flash-attn": _version("flash-attn") or "not installed"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _satisfies(version: str | None, requirement: Requirement) -> bool:
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _first_line(command: str, *arguments: str, last: bool = False) -> str | None:
    """Returns the first (or last) line that a command prints; None if the command cannot run or fails."""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1 if last else 0] if done.returncode == 0 and lines else None


# ---- known problems: each check yields one line per problem, with its remedy


def _check_packages(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for requirement in map(Requirement, importlib.metadata.requires(DISTRIBUTION) or []):
        version = _version(requirement.name)
        if requirement.marker is not None:  # an extra
            continue
        if not _satisfies(version, requirement):
            yield (
                f"{requirement.name} {version or 'is not installed'}: Weft requires {requirement.specifier}; "
                f"pip install '{requirement.name}{requirement.specifier}'"
            )
    torch_version = Version(found["versions"]["torch"])
    if Version(f"{torch_version.major}.{torch_version.minor}") > Version(NEWEST_TORCH):
        yield (
            f"torch {torch_version} is newer than {NEWEST_TORCH}, the newest version that Weft was tested with; if "
            f"Weft fails, install torch {NEWEST_TORCH}"
        )


def _check_private_names(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield from missing()


def _check_gpu(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    devices, build = found["devices"], found["versions"]["torch built for"]
    usable = any(name.startswith("gpu ") for name in devices)
    if devices["nvidia_driver"] and not usable:
        hidden = "CUDA_VISIBLE_DEVICES" in found["variables"]
        remedy = "unset CUDA_VISIBLE_DEVICES" if hidden else "install a CUDA build of torch that the driver supports"
        driver = devices["nvidia_driver"]
        yield f"the NVIDIA driver {driver} is installed, but torch (built for {build}) finds no GPU; {remedy}"
    if build.startswith("CUDA") and not usable and not devices["nvidia_driver"]:
        yield f"torch is built for {build}, but no NVIDIA driver is installed; install one, or a CPU build of torch"
    if usable and found["compilers"]["triton"] is None:
        yield "triton is not installed, but training.compile needs triton on a GPU; run pip install triton"
    if found["extras"]["flash-attn"] != "not installed":
        try:
            load_reference("flash_attn:flash_attn_func")  # its C++ extension may not fit this torch
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield f"flash-attn is installed but cannot be imported ({reason}); reinstall it for this torch"


def _check_limits(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    storage = found["memory and disk"]
    if storage.get("shared memory free_bytes", SHARED_MEMORY) < SHARED_MEMORY:
        size = byte_size(storage["shared memory free_bytes"])
        yield f"/dev/shm has {size} free; data workers and NCCL can fail; start the container with --shm-size=8g"
    if 0 <= storage.get("open files limit", OPEN_FILES) < OPEN_FILES:
        yield f"the limit of open files is only {storage['open files limit']}; raise the limit: ulimit -n 65536"
    if storage["working directory free_bytes"] < FREE_DISK:
        size = byte_size(storage["working directory free_bytes"])
        yield f"the working directory has {size} free; checkpoints may not fit; set run.directory to a larger disk"
    if found["compilers"]["c++"] is None:
        yield "no C++ compiler works on this machine, but training.compile needs a compiler on a CPU; install g++"
    threads = found["variables"].get("OMP_NUM_THREADS")
    if threads is not None and not (threads.isdigit() and 1 <= int(threads) <= found["devices"]["cores"]):
        cores = found["devices"]["cores"]
        yield f"OMP_NUM_THREADS={threads!r} is not a number from 1 to {cores} (usable cores); unset the variable"


CHECKS = (_check_packages, _check_private_names, _check_gpu, _check_limits)


def problems(found: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the known problems of an environment, each with a remedy."""
    return [problem for check in CHECKS for problem in check(found)]
