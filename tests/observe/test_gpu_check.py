"""benchmarks/gpu_check.py: what it does with its time, and what it leaves on disk."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def check(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MARGIN", 0.0)

    def run(jobs, seconds):
        arguments = ["gpu_check", "--device", "cpu", "--minutes", str(seconds / 60), "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.setattr(module, "jobs", lambda _: jobs)
        code = module.main()
        return code, {job["name"]: job for job in json.loads((tmp_path / "gpu_check-cpu.json").read_text())}

    return module, run


def test_parts_share_the_time_and_each_leaves_its_result(check, tmp_path):
    module, run = check
    slow = ["-c", "import time; print('begun', flush=True); time.sleep(60)"]
    quick = ["-c", "print('measured in {minutes} minutes')"]
    code, found = run(
        [
            module.Job("first", "a slow one", slow, 60, least=1),
            module.Job("absent", "what needs more", quick, 60, least=1, reserve=60, needs=("no_such_package",)),
            module.Job("second", "what has its reserve", quick, 60, least=1, reserve=3),
            module.Job("broken", "one that fails", ["-c", "raise SystemExit(3)"], 60, least=1),
            module.Job("late", "one without time", quick, 60, least=30),
        ],
        seconds=5,
    )
    assert code == 1
    assert {name: job["status"] for name, job in found.items()} == {
        "first": "cut short after 2 s",
        "absent": "left out: no_such_package is not installed",
        "second": "done",
        "broken": "failed with exit code 3",
        "late": "not started: the time was over",
    }
    assert (tmp_path / "gpu_check" / "first.txt").read_text() == "begun\n"
    assert found["second"]["last"].startswith("measured in 0.0")
    page = (tmp_path / "gpu_check-cpu.md").read_text()
    assert all(job["status"] in page for job in found.values())


def test_the_parts_are_in_order_of_value(check, monkeypatch):
    module, _ = check
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--minutes", "9"])
    jobs = module.jobs(module.arguments())
    names = [job.name for job in jobs]
    assert names[:6] == ["tests", "training-bf16", "training-fp8", "generation", "trainer", "torchtitan"]
    # Whatever the tests take, each part that the goals need keeps time for a measurement.
    assert sum(job.reserve for job in jobs) + jobs[0].seconds <= 60 * 9 - module.MARGIN
