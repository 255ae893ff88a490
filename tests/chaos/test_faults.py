"""Faults of disks, clocks and files in real runs: each is named, none is used silently, the same command goes on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.chaos
WEFT = [sys.executable, "-m", "weft", "train"]
LOSSES = ("loss", "grad_norm", "lr", "tokens", "validation_loss")


def losses(run: Path) -> dict:
    """step -> the numbers of its last line in metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: [line.get(name) for name in LOSSES] for line in lines}


def train(*command, **environment) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [*WEFT, *map(str, command)], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def calm(run_yaml, tmp_path):
    """The losses of an undisturbed run, and the bytes of one of its checkpoints."""
    file = run_yaml("calm.yaml", run={"name": "calm"})
    assert train(file).returncode == 0
    run = tmp_path / "runs" / "calm"
    size = sum(part.stat().st_size for part in max(run.glob("checkpoints/step-*")).iterdir())
    return losses(run), size


@pytest.fixture
def shim(tmp_path):
    """A library for LD_PRELOAD (`shim.c`)."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    library = tmp_path / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return str(library)


@pytest.fixture
def mounts():
    """A command whose mounts end with it; skips where there are none to be had."""
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces")
    return command


def inside(mounts, script: str, folder: Path) -> list[str]:
    """Runs a script in a namespace of its own. Returns what each of its lines `code=$?` echoed, and stderr."""
    done = subprocess.run([*mounts, "bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return [*done.stdout.split(), done.stderr]


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(mounts, calm, run_yaml, tmp_path):
    expected, size = calm
    (tmp_path / "small").mkdir()
    file = run_yaml(run={"directory": str(tmp_path / "small")})
    command = " ".join([*WEFT, str(file)])
    script = f"""
    mount -t tmpfs -o size={int(2.6 * size)} none small
    {command} > /dev/null; echo $?
    ls small/demo/checkpoints | grep -c '^step-'
    mount -o remount,size=64m small
    {command} > /dev/null; echo $?
    cp -r small/demo kept
    """
    first, complete, second, told = inside(mounts, script, tmp_path)
    assert (first, second) == ("2", "0"), told
    assert int(complete) >= 1
    assert "space" in told
    assert "step-000000" in told
    assert losses(tmp_path / "kept") == expected
    assert not [entry.name for entry in (tmp_path / "kept" / "checkpoints").iterdir() if entry.name.startswith(".")]


def test_a_read_only_disk_is_one_line(mounts, run_yaml, tmp_path):
    (tmp_path / "disk").mkdir()
    file = run_yaml(run={"directory": str(tmp_path / "disk")})
    command = " ".join([*WEFT, str(file)])
    script = f"""
    mount -t tmpfs -o size=64m none disk
    {command} > /dev/null 2> /dev/null; echo $?
    rm -r disk/demo/checkpoints/step-00000030
    mount -o remount,ro disk
    {command} > /dev/null; echo $?
    """
    *codes, told = inside(mounts, script, tmp_path)
    assert codes[-1] == "2", told
    assert "ead-only" in told
    assert len(told.strip().splitlines()) <= 2


def test_a_clock_that_goes_back_changes_no_number(shim, calm, run_yaml, tmp_path):
    done = train(run_yaml(), LD_PRELOAD=shim, CLOCK_BACK="3600")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "demo"
    assert losses(run) == calm[0]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(value >= 0 for line in lines for value in line.values() if isinstance(value, int | float))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_slow_disk_changes_no_number(shim, calm, run_yaml, tmp_path, mode):
    done = train(run_yaml(checkpoint={"mode": mode}), LD_PRELOAD=shim, SLOW_WRITE="80")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "runs" / "demo") == calm[0]


@pytest.mark.parametrize("damage", ["a flipped bit", "no file", "cut"])
def test_every_file_of_a_checkpoint_in_turn(calm, run_yaml, tmp_path, damage):
    """A file of the last checkpoint is damaged: a resume names it and uses nothing; `--from-last-good` goes on."""
    file = run_yaml(checkpoint={"keep_last": 3})
    assert train(file).returncode == 0
    made = tmp_path / "runs" / "demo"
    shutil.rmtree(made / "checkpoints" / "step-00000030")
    shutil.copytree(made, tmp_path / "copy")
    names = sorted(part.name for part in (made / "checkpoints" / "step-00000020").iterdir())
    assert len(names) >= 5
    for name in names:
        shutil.rmtree(made)
        shutil.copytree(tmp_path / "copy", made)
        part = made / "checkpoints" / "step-00000020" / name
        content = bytearray(part.read_bytes())
        if damage == "no file":
            part.unlink()
        else:
            content[len(content) // 2] ^= 4
            part.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
        done = train(file)
        assert done.returncode == 2, (name, done.stderr)
        assert name in done.stderr, (name, done.stderr)
        done = train(file, "--from-last-good")
        assert done.returncode == 0, (name, done.stderr)
        assert losses(made) == calm[0], name
