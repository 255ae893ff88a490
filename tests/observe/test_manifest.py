"""manifest.json and the ranks' logs."""

import json
import logging
import os
import subprocess
import sys
import warnings

import pytest

from weft import processes
from weft.errors import UserError
from weft.launch.local import join_launcher
from weft.observe.logs import log_to_file, stop_log
from weft.observe.manifest import end_session, git_state, read_manifest, write_manifest

CONFIG = {"run": {"name": "demo", "seed": 7}, "training": {"dtype": "bfloat16", "threads": 2}}


@pytest.mark.parametrize("program", ["bin/weft", "weft/__main__.py"])
def test_what_is_needed_to_run_it_again(tmp_path, monkeypatch, program):
    monkeypatch.setattr(sys, "argv", [f"/usr/{program}", "train", "my run.yaml", "optimizer.lr=1e-3"])
    monkeypatch.setenv("WEFT_COMMAND", "weft train other.yaml --nproc 2")  # of an earlier launch by this process
    path = write_manifest(tmp_path, CONFIG, ranks=4, data_digests={"train": "abc"}, peak_origin="measured")
    manifest = json.loads(path.read_text())
    assert path.name == "manifest.json"
    assert (manifest["name"], manifest["seed"], manifest["dtype"], manifest["threads"]) == ("demo", 7, "bfloat16", 2)
    assert manifest["command"] == "weft train 'my run.yaml' optimizer.lr=1e-3"
    assert (manifest["ranks"], manifest["data_digests"], manifest["peak_origin"]) == (4, {"train": "abc"}, "measured")
    assert {"weft", "torch", "python", "numpy", "tokenizers"} <= manifest["versions"].keys()
    assert manifest["hardware"]["memory_bytes"] > 2**28
    assert manifest["hardware"]["cpu"]


def test_the_command_of_a_rank_is_that_of_its_launcher_and_not_of_its_child_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "launched_by", "")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WEFT_COMMAND", "/usr/bin/weft train run.yaml --nproc 2")
    join_launcher()
    assert "WEFT_COMMAND" not in os.environ
    for _ in range(2):
        path = write_manifest(tmp_path, CONFIG)
        assert json.loads(path.read_text())["command"] == "weft train run.yaml --nproc 2"


def test_every_session_is_kept(tmp_path):
    write_manifest(tmp_path, CONFIG, ranks=1)
    first = read_manifest(tmp_path)["started"]
    end_session(tmp_path, status="stopped", step=17)
    write_manifest(tmp_path, CONFIG, resumed_step=17, ranks=2)
    end_session(tmp_path, status="finished", step=40)
    manifest = read_manifest(tmp_path)
    assert manifest["started"] == first
    told = [(s["step"], s["last_step"], s["status"], s["ranks"]) for s in manifest["sessions"]]
    assert told == [(0, 17, "stopped", 1), (17, 40, "finished", 2)]
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_a_damaged_manifest_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text('{"sessions": [')
    with pytest.raises(UserError, match=r"manifest\.json: cannot be read"):
        write_manifest(tmp_path, CONFIG)


def test_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path)["dirty"] is True
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None


@pytest.fixture
def _no_log():
    stop_log()
    level = logging.getLogger().level
    yield
    stop_log()
    assert logging.getLogger().level == level


@pytest.mark.usefixtures("_no_log")
def test_each_rank_has_its_log_and_appends(tmp_path):
    for words in ("first", "second"):
        log_to_file(tmp_path, 3)
        logging.getLogger("weft.train").info("%s session \ud800", words)
        logging.getLogger("somebody.else").warning("theirs")
        stop_log()
    lines = (tmp_path / "logs" / "rank-00003.log").read_text().splitlines()
    assert len(lines) == 4
    assert "INFO    weft.train: first session" in lines[0]
    assert "WARNING somebody.else: theirs" in lines[3]
    assert lines[0][:2] == "20"  # a time stamp


@pytest.mark.usefixtures("_no_log")
def test_warnings_go_to_the_log_and_not_to_the_console(tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        log_to_file(tmp_path, 0)
        warnings.warn("torch is worried", UserWarning, stacklevel=1)
        stop_log()
    assert "torch is worried" in (tmp_path / "logs" / "rank-00000.log").read_text()
    assert "worried" not in capsys.readouterr().err


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(UserError, match="rank-00000"):
        log_to_file(tmp_path, 0)
