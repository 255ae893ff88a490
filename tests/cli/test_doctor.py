"""`weft doctor`: what it prints is true, and each known problem is found with its remedy."""

import copy
import json
import os
import platform
import re

import numpy
import psutil
import pytest
import torch

from weft.cli.main import main
from weft.observe import environment as module


@pytest.fixture(scope="module")
def environment():
    return module.environment()


def printed(capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["problems"] else 0)
    return found


def test_it_prints_this_machine(capsys):
    found = printed(capsys)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["numpy"] == numpy.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["devices"]["cores"] == len(os.sched_getaffinity(0))
    assert found["memory and disk"]["memory_bytes"] == psutil.virtual_memory().total
    assert "gloo" in found["interconnect"]["backends"]
    assert found["extras"]["tokenizers"] == "installed"
    assert {"wandb", "hf", "eval", "fp8"} <= found["extras"].keys()


def test_the_text_has_the_same_facts_and_no_names_of_the_machine(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["doctor"])
    text = capsys.readouterr().out
    for section in ("versions", "devices", "memory and disk", "interconnect", "compilers", "extras", "problems"):
        assert re.search(rf"^{section}$", text, re.M)
    assert torch.__version__ in text
    assert str(tmp_path) not in text
    assert platform.node() not in text.split()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found["compilers"].update({"c++": None}), ["C++", "install g++"]),
        (lambda found: found["variables"].update(OMP_NUM_THREADS=""), ["OMP_NUM_THREADS", "unset"]),
        (lambda found: found["variables"].update(OMP_NUM_THREADS="100000"), ["OMP_NUM_THREADS", "100000"]),
        (lambda found: found["memory and disk"].update({"shared memory free_bytes": 64e6}), ["/dev/shm", "--shm-size"]),
        (lambda found: found["memory and disk"].update({"open files limit": 256}), ["256", "ulimit -n"]),
        (lambda found: found["memory and disk"].update({"working directory free_bytes": 1e6}), ["run.directory"]),
        (lambda found: found["versions"].update(torch="9.1.0"), ["9.1.0", "tested"]),
        (lambda found: found["devices"].update(nvidia_driver="570.1"), ["570.1", "no GPU", "CUDA build"]),
        (lambda found: found["versions"].update({"torch built for": "CUDA 12.8"}), ["CUDA 12.8", "driver"]),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases describe a machine without a GPU")
def test_known_problems_are_found(capsys, monkeypatch, environment, change, words):
    def changed():
        found = copy.deepcopy(environment)
        found["variables"].pop("OMP_NUM_THREADS", None)
        found["versions"]["torch built for"] = "CPU"
        found["memory and disk"].update({"working directory free_bytes": 1e12, "open files limit": 65536})
        found["memory and disk"]["shared memory free_bytes"] = 64e9
        change(found)
        return found

    monkeypatch.setattr(module, "environment", changed)
    (problem,) = printed(capsys)["problems"]
    assert all(word in problem for word in words)
