"""What all tests share: their threads, what needs a GPU, and a tiny corpus with its tokenizer and store."""

import os
import sys
from pathlib import Path

import pytest


def _cores() -> int:
    """The cores this process may use: its affinity, or less where a container has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


# Before torch is imported anywhere, also in the processes that tests start: threads that spin while they wait for work
# starve the other workers, and more threads than cores are slower than one.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, max(1, _cores() // _workers)) if _workers > 1 else 1))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nothing a test does reaches a hub or a tracker's server.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="offline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """`-n auto`: one worker a core, at most 8 (each holds a torch of its own)."""
    return min(_cores(), 8)


def pytest_collection_modifyitems(config, items):
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _same_start():
    """Every test starts from the same seed and leaves no compiled code behind.

    More than 8 compiled variants of one function in a process fall back to eager with only a warning.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
