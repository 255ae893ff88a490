"""A kill -9 at every operation on a file: a resume finds all checkpoints that were complete, and the same numbers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kills import wanted

HERE = Path(__file__).parent
ALL = "async, local and remote"
WITHOUT_HOST = "remote, host lost"


def modes(work: Path) -> dict[str, dict]:
    """Name -> section `checkpoint`."""
    local = {"steps": 1, "directory": str(work / "files" / "local")}
    remote = {"every": 2, "keep_last": 1, "remote": f"file://{work}/files/store"}
    return {
        "sync": {"every": 2, "keep_last": 2},
        "async": {"every": 2, "keep_last": 2, "mode": "async"},
        "local": {"every": 3, "keep_last": 1, "local": local},
        "async and local": {"every": 3, "keep_last": 1, "mode": "async", "local": local},
        "keep_best": {"every": 1, "keep_last": 1, "keep_best": 1, "keep_every": 3},
        "remote": remote,
        WITHOUT_HOST: remote | {"mode": "async"},
        ALL: remote | {"mode": "async", "every": 3, "local": local},
    }


@pytest.fixture
def kills(run_yaml, tmp_path):
    """Kills runs of a mode at `number` operations (0: all), and returns what `killed_saves.py` prints."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    library = tmp_path / "killer.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "killer.c", "-ldl"], check=True)

    def run(mode: str, number: int) -> list[dict]:
        run_yaml(
            run={"directory": str(tmp_path / "files" / "runs")},
            model={"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64},
            data={"sequence_length": 32} | ({} if mode == "keep_best" else {"validation": None}),
            training={"steps": 6, "batch_tokens": 64, "micro_batch_size": 2, "threads": 1},
            validation={"every": 1, "tokens": 32} if mode == "keep_best" else None,
            checkpoint=modes(tmp_path)[mode],
            callbacks=[{"type": "killed_saves:Saves"}],
            log={"trackers": []},
        )
        shutil.copy(HERE / "killed_saves.py", tmp_path)
        command = [sys.executable, HERE / "killed_saves.py", mode, tmp_path, number]
        environment = os.environ | {"LD_PRELOAD": str(library), "WEFT_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def check(kills, mode: str, number: int) -> None:
    counted, *faults, ended = kills(mode, number)
    assert not faults, json.dumps(faults, indent=1)[:5000]
    assert {"open", "write", "fsync", "rename", "close", "mkdir"} <= set(counted["kinds"])
    assert counted["operations"] > 150
    assert ended["kills"] == (number or counted["operations"])


@pytest.mark.chaos
@pytest.mark.parametrize("mode", modes(Path("/")))
def test_a_kill_at_every_operation(kills, mode):
    check(kills, mode, wanted())


@pytest.mark.long
def test_kills_at_some_operations(kills):
    check(kills, ALL, 4)
