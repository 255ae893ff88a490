"""One writer per run directory, damaged stores, secrets, and directories that others can change."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import threading
import time

import pytest
from forked import Forked
from running import QUIET, SLOW, finish, losses, train, until_step

import weft.files
from weft.checkpoint.run_lock import unlock_run
from weft.cli.main import main
from weft.errors import UserError
from weft.formatting import masked, without_secrets
from weft.processes import boot_id
from weft.train.run_directory import claim, warn_of_other_writers

SHORT = {
    "training": {"steps": 2, "batch_tokens": 256, "threads": 1},
    "schedule": {"warmup_steps": 1},
    "data": {"validation": None},
    "log": QUIET,
}


def test_a_second_writer_is_refused_with_the_owner_and_a_killed_one_holds_no_lock(
    run_yaml, tmp_path, monkeypatch, capsys
):
    (tmp_path / "slow_for_safety.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    slow = {"type": "slow_for_safety:Slow", "seconds": 0.2, "warmup_steps": 0}
    file = run_yaml(**SHORT | {"schedule": slow, "training": SHORT["training"] | {"steps": 300}})
    process = Forked("train", file, cwd=tmp_path)
    until_step(process, tmp_path / "runs" / "demo", 1)
    assert train(file) == 2
    said = capsys.readouterr().err
    assert f"another process (process {process.pid} on {socket.gethostname()}, since 20" in said
    process.kill()
    finish(process)
    assert train(file, "training.steps=2") == 0
    assert (tmp_path / "runs" / "demo" / ".lock").read_bytes() == b""


@pytest.fixture
def without_locks(monkeypatch):
    """A file system without locks, as some network file systems are."""

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(weft.files.fcntl, "flock", refuse)


def test_a_restart_waits_for_the_data_workers_of_a_rank_that_died(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    held = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)  # as the worker does, which inherited it
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(
        held, json.dumps({"host": socket.gethostname(), "pid": dead.pid, "boot": boot_id(), "since": "now"}).encode()
    )
    threading.Timer(0.5, os.close, [held]).start()
    os.close(claim(tmp_path, fresh=False))
    assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()


def test_what_inherited_the_lock_does_not_keep_it(tmp_path):
    lock = claim(tmp_path, fresh=False)
    inherited = os.dup(lock)  # the same open file, as in a forked data worker that is slow to end
    with pytest.raises(UserError, match=r"another process \(process \d+ on"):
        claim(tmp_path, fresh=False)
    unlock_run(lock)
    os.close(claim(tmp_path, fresh=False))
    os.close(inherited)


def test_without_locks_the_recorded_owner_counts_while_it_may_run(tmp_path, without_locks):
    run = tmp_path / "run"
    run.mkdir()

    def owned(**owner) -> None:
        record = {"host": socket.gethostname(), "pid": os.getppid(), "boot": boot_id(), "since": "then"} | owner
        (run / ".lock").write_text(json.dumps(record))

    owned()  # this host, a running process
    with pytest.raises(UserError, match=f"process {os.getppid()} on "):
        claim(run, fresh=False)
    for gone in ({"pid": 2**22 + 5}, {"boot": "an earlier start of this host"}):
        owned(**gone)
        os.close(claim(run, fresh=False))
    (run / "metrics.jsonl").write_text("")
    owned(host="elsewhere")  # it has written a moment ago
    with pytest.raises(UserError, match="on elsewhere"):
        claim(run, fresh=False)
    os.utime(run / "metrics.jsonl", (time.time() - 3600,) * 2)
    os.close(claim(run, fresh=False))
    (run / ".lock").write_text("{not json")
    os.close(claim(run, fresh=False))


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    run, target = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    target.write_text("precious")
    (run / ".lock").symlink_to(target)
    with pytest.raises(UserError):
        claim(run, fresh=False)
    assert target.read_text() == "precious"


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_bit_of_a_store_is_found_before_the_first_step(run_yaml, tmp_path, tiny_store, capsys, where):
    store = shutil.copytree(tiny_store, tmp_path / "store")
    file = run_yaml(**SHORT | {"data": {"validation": None, "train": str(store)}})
    data = bytearray((store / "tokens.bin").read_bytes())
    data[{"first": 0, "middle": len(data) // 2 & ~1, "last": len(data) - 2}[where]] ^= 1
    (store / "tokens.bin").write_bytes(data)
    for option in ((), ("--verify",)):
        assert train(file, *option) == 2
        said = capsys.readouterr().err
        assert "damaged token store" in said
        assert str(store) in said
    assert not losses(tmp_path / "runs" / "demo")


def test_stores_of_earlier_versions_have_no_sample_and_are_verified_completely(run_yaml, tmp_path, tiny_store, capsys):
    from weft.data.stores.store_json import content_digest, to_bytes

    store = shutil.copytree(tiny_store, tmp_path / "store")
    content = json.loads((store / "store.json").read_text())
    del content["sample_sha256"]
    content["digest"] = content_digest(content)
    (store / "store.json").write_bytes(to_bytes(content))
    file = run_yaml(**SHORT | {"data": {"validation": None, "train": str(store)}})
    assert train(file, "--verify") == 0


def test_secrets_of_the_command_line_and_of_the_environment_are_in_no_file(run_yaml, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "hunter2hunter2")
    words = ["weft", "train", "--api-key", "sesame123", "x.api_key=sesame123", "s3://me:sesame123@host/x"]
    words += ["callbacks.0.note=hunter2hunter2", "--note=hunter2hunter2", "--note", "hunter2hunter2"]
    monkeypatch.setattr("sys.argv", words)
    (tmp_path / "kept_for_safety.py").write_text("class Kept:\n    def __init__(self, note: str):\n        pass\n")
    (tmp_path / "kept_for_safety.py").write_text(
        "class Kept:\n    def __init__(self, note: str):\n        self.note = note\n\n    def step(self, state):\n"
        "        assert self.note == 'hunter2hunter2'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    callbacks = [{"type": "kept_for_safety:Kept", "note": "${SERVICE_TOKEN}"}]
    file = run_yaml(**SHORT | {"log": {"trackers": ["tensorboard"]}}, callbacks=callbacks)
    assert train(file) == 0
    for path in (tmp_path / "runs").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"sesame123" not in content, path
            assert b"hunter2hunter2" not in content, path
    assert train(file, "training.steps=3") == 0  # the saved config still equals the file


def test_the_name_of_a_run_and_the_type_of_a_component_are_no_secrets(run_yaml, tmp_path, monkeypatch):
    """Its folder has the name anyway. Without the variable, the run is still found, and resumes."""
    monkeypatch.setenv("SERVICE_TOKEN", "demonstration")
    monkeypatch.setenv("OTHER_PASSWORD", "constant")
    named = SHORT | {"schedule": {"type": "constant", "warmup_steps": 0}, "run": {"name": "demonstration"}}
    monkeypatch.setattr("sys.argv", ["weft", "train", "run.name=demonstration", "schedule.type=constant"])
    assert train(run_yaml(**named)) == 0
    run = tmp_path / "runs" / "demonstration"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["name"] == "demonstration"
    assert manifest["command"] == "weft train run.name=demonstration schedule.type=constant"
    saved = (run / "config.yaml").read_text()
    assert "name: demonstration" in saved
    assert "type: constant" in saved
    monkeypatch.delenv("SERVICE_TOKEN")
    monkeypatch.delenv("OTHER_PASSWORD")
    assert main(["config", "show", str(run / "config.yaml")]) == 0


def test_what_is_a_secret_and_what_is_not():
    plain = ["run.yaml", "training.tokens=512", "tokenizer=tok", "--max-new-tokens", "5", "data.train=s3://bucket/x"]
    assert without_secrets(plain) == plain
    assert without_secrets(["--token", "abc", "--api-key=abc", "tracker.password=abc", "http://u:p@h/"]) == [
        *("--token", "***", "--api-key=***", "tracker.password=***", "http://u:***@h/")
    ]
    assert masked({"a": [{"api_key": "abc", "name": "x"}], "url": "http://u:p@h"}) == {
        "a": [{"api_key": "***", "name": "x"}],
        "url": "http://u:***@h",
    }


def test_a_directory_that_everybody_can_change_is_a_warning(run_yaml, tmp_path, capsys):
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    run.chmod(0o777)
    assert train(run_yaml(**SHORT)) == 0
    assert f"{run} can be changed by all users of this host" in capsys.readouterr().err


def test_a_directory_of_another_user_is_a_warning(tmp_path, monkeypatch):
    assert warn_of_other_writers(tmp_path) is None
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    warning = warn_of_other_writers(tmp_path) or ""
    assert warning.startswith(f"{tmp_path} belongs to another user (uid {owner}), ")
    assert warning.endswith("; set run.directory")
