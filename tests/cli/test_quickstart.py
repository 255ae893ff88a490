"""The quickstart, on the beginnings of the standard library's files, with a smaller model that is not compiled."""

import os
import signal
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Forked

from weft.cli import quickstart
from weft.cli.main import main
from weft.config.run import RunConfig
from weft.config.tree import read_file


class Command:
    """The started command, run in this process."""

    def __init__(self, words):
        assert words[:3] == [sys.executable, "-m", "weft"]
        self.code = main(words[3:])

    def wait(self):
        return self.code


def test_from_the_standard_library_to_a_model_that_writes(tmp_path, monkeypatch, capfd):
    library = tmp_path / "library"
    library.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        (library / path.name).write_text(path.read_text(encoding="utf-8")[:3000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": str(library)}))
    monkeypatch.setattr(quickstart, "subprocess", SimpleNamespace(Popen=Command))
    monkeypatch.setattr(quickstart, "TRIAL_STEPS", 21)
    monkeypatch.setattr(quickstart, "VOCABULARY", 512)
    yaml = quickstart.RUN_YAML
    for before, after in (
        ("size: 96", "size: 32"),
        ("layers: 4", "layers: 1"),
        ("max_new_tokens: 48", "max_new_tokens: 4"),
        ("compile: {compile}", "compile: false"),
        ("tokens: 65536", "tokens: 4096"),
        ("tokens: 2048", "tokens: 512"),
        ("micro_batch_size: 8", "micro_batch_size: 2"),
    ):
        assert before in yaml
        yaml = yaml.replace(before, after)
    monkeypatch.setattr(quickstart, "RUN_YAML", yaml)
    assert main(["quickstart", "--minutes", "0.005"]) == 0
    printed, progress = capfd.readouterr()
    assert "warning" not in progress
    assert "gzip -9" in printed
    assert "this model" in printed
    assert "def " in printed
    for verb in ("data train-tokenizer", "data pack", "train", "generate", "report"):
        assert f"$ weft {verb}" in progress
    assert RunConfig.load(tmp_path / "quickstart" / "run.yaml").training.steps >= 20
    held_out = (tmp_path / "quickstart" / "heldout.txt").read_text().splitlines()
    train = (tmp_path / "quickstart" / "train.txt").read_text().splitlines()
    assert not set(held_out) & set(train)
    assert 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.09


@pytest.mark.parametrize("minutes", ["nan", "inf", "0", "-1", "1e300"])
def test_minutes_that_are_no_length_are_refused(minutes, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--minutes", minutes]) == 2
    assert f"--minutes {float(minutes):g}: use a number above 0" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("home", ["quick start", "a, b", "a: b", "a #b", "{x}", "it's", 'a"b', "~", "${HOME}", "ü"])
def test_any_name_of_a_directory(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(quickstart.run_yaml(file, Path(home), 20, part=4), encoding="utf-8")
    values = read_file(file, "run.yaml", problems := []).plain()
    assert not problems
    paths = values["tokenizer"], values["data"]["train"], values["data"]["validation"], values["run"]["directory"]
    assert [Path(path) for path in paths] == [Path(home) / n for n in ("tokenizer", "train", "heldout", "runs")]


@pytest.mark.parametrize("fresh", [[], ["--fresh"]])
def test_a_run_file_of_somebody_else_is_left_alone(fresh, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: llama-tiny\n")
    assert main(["quickstart", "--directory", ".", *fresh]) == 2
    assert "run.yaml: not written by `weft quickstart`; choose another --directory" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert (tmp_path / "run.yaml").read_text() == "model: llama-tiny\n"


def test_without_a_compiler_the_model_is_not_compiled(tmp_path, monkeypatch):
    file = tmp_path / "run.yaml"
    for compiler, value in (("/no/g++", "compile: false"), (sys.executable, "compile: true")):
        monkeypatch.setenv("CXX", compiler)
        assert value in quickstart.run_yaml(file, Path("home"), 20, part=4)


STARTS = """
import subprocess, sys
from types import SimpleNamespace
from weft.cli import quickstart

CHILD = "import signal, sys; signal.signal(15, lambda *_: sys.exit(143)); print('begun', flush=True); signal.pause()"
quickstart.subprocess = SimpleNamespace(Popen=lambda _: subprocess.Popen([sys.executable, "-S", "-c", CHILD]))
quickstart.weft("train", "run.yaml")
"""


def test_sigterm_also_ends_the_command_that_runs():
    process = Forked(program=STARTS)
    try:
        assert process.first_line() == "begun", process.stderr
        os.kill(process.pid, signal.SIGTERM)
        _, errors = process.communicate(30)
    finally:
        process.kill()
    assert (process.returncode, errors.splitlines()[-1]) == (143, "stopped; `weft quickstart` resumes from here")
