"""`weft checkpoint list` and `verify` on a run with local checkpoints and copies in an object store."""

import json
import shutil
from pathlib import Path

import forked
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from weft.checkpoint import remote
from weft.cli.main import main

KILLED = """
import os, signal, sys
from weft.config.run import RunConfig
from weft.train.trainer import Trainer
from weft.train import loop
real = loop.Loop.after_update
def after(self, step):
    real(self, step)
    if step == 5:
        self.saver._uploader.finish()
        os.kill(os.getpid(), signal.SIGKILL)
loop.Loop.after_update = after
Trainer(RunConfig.load(sys.argv[1])).fit()
"""


@pytest.fixture
def run(run_yaml, tmp_path) -> Path:
    """A run that was killed after step 5: 2 and 4 in its directory, 4 and 5 in the host's memory, 4 in the store."""
    local = {"steps": 1, "directory": str(tmp_path / "memory")}
    path = run_yaml(
        training={"steps": 6, "batch_tokens": 128, "micro_batch_size": 2},
        data={"validation": None},
        checkpoint={"every": 2, "local": local, "remote": f"file://{tmp_path}/store"},
    )
    done = forked.run(path, program=KILLED)
    assert done.returncode == -9, done.stderr
    return tmp_path / "runs" / "demo"


def listed(capsys, given) -> list[tuple]:
    capsys.readouterr()
    assert main(["checkpoint", "list", str(given), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(row["step"], row["place"], row["state"]) for row in rows]


def verified(capsys, *arguments) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["checkpoint", "verify", *map(str, arguments)])
    return code, capsys.readouterr().out.splitlines()


def test_list_and_verify_show_what_is_where(run, tmp_path, capsys):
    store = tmp_path / "store"
    (copy,) = store.glob("demo/*/step-00000004")
    (local,) = tmp_path.glob("memory/weft-*/*/checkpoints/step-00000005")
    durable = [(2, "run", "complete"), (4, "run", "complete")]
    kept = [(step, place, state) for step, place, state in listed(capsys, run) if place != "run"]
    assert [one for one in listed(capsys, run) if one[1] == "run"] == durable
    assert (5, "local", "complete") in kept
    assert (4, "store", "complete") in kept
    assert main(["checkpoint", "list", str(run)]) == 0
    table = capsys.readouterr()
    assert "place" in table.out + table.err
    code, lines = verified(capsys, run, "--store")
    assert code == 0, lines
    assert all("undamaged" in line for line in lines)
    assert len(lines) == len(durable) + len(kept)

    lost = next(local.glob("shard-*"))
    lost.rename(tmp_path / "elsewhere")
    assert (5, "local", "4 of 5 files are on this host") in listed(capsys, run)
    assert verified(capsys, run)[0] == 0  # other hosts may have it
    (tmp_path / "elsewhere").rename(lost)
    (copy / "complete.json").rename(tmp_path / "marker")
    assert (4, "store", "an incomplete upload, which is not used") in listed(capsys, run)
    (tmp_path / "marker").rename(copy / "complete.json")

    flipped = bytearray((copy / lost.name).read_bytes())
    flipped[-1] ^= 1
    (copy / lost.name).write_bytes(flipped)
    with (local / "state.json").open("r+b") as file:
        file.write(b"!")
    code, lines = verified(capsys, run)
    assert code == 2
    (damaged,) = [line for line in lines if "undamaged" not in line]
    assert damaged.startswith(f"{local / 'state.json'}: damaged local checkpoint: the contents of the file differ")
    code, lines = verified(capsys, run, "--store")
    damaged = f"{lost.name}: the contents of the object differ from what was written (SHA-256)"
    assert any(line.endswith(f"step-00000004: damaged copy: {damaged}") for line in lines)
    (copy / lost.name).unlink()
    code, lines = verified(capsys, run)
    assert any(line.endswith(f"damaged copy: {lost.name}: the object is missing") for line in lines)


def test_the_copies_of_a_run_whose_host_is_gone(run, tmp_path, capsys):
    shutil.rmtree(run)
    url = f"file://{tmp_path}/store/demo"
    assert (4, "store", "complete") in listed(capsys, url)
    code, lines = verified(capsys, url, "--store")
    assert code == 0
    assert all("undamaged" in line for line in lines)
    assert main(["checkpoint", "list", f"file://{tmp_path}/store/other"]) == 2
    assert "no run has copies here" in capsys.readouterr().err


class Gone(MemoryFileSystem):
    """A store that answers nothing."""

    protocol = "gone"

    def info(self, path, **options):
        raise OSError(503, "Service Unavailable")


def test_a_store_that_is_gone_is_a_warning_of_list_and_fails_verify(run, capsys, monkeypatch):
    fsspec.register_implementation("gone", Gone, clobber=True)
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    record = json.loads((run / "remote-checkpoints.json").read_text())
    (run / "remote-checkpoints.json").write_text(json.dumps(record | {"url": "gone://bucket/demo"}))
    assert (4, "run", "complete") in listed(capsys, run)
    assert main(["checkpoint", "verify", str(run)]) == 2
    said = capsys.readouterr()
    assert all("undamaged" in line for line in said.out.splitlines())
    assert "gone://bucket/demo: OSError: [Errno 503] Service Unavailable" in " ".join(said.err.split())
