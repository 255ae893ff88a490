"""`weft config check | show | schema`."""

import json
import subprocess
import sys

import pytest

from weft.cli.main import main
from weft.config.run import RunConfig

RUN = """\
model: {preset: llama-tiny, vocab_size: 512}
data: {train: store, sequence_length: 64}
training: {steps: 30, batch_tokens: 1024}
"""


@pytest.fixture(autouse=True)
def _run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "run.yaml").write_text(RUN)


def test_check_says_what_follows(capsys):
    assert main(["config", "check", "run.yaml", "--no-data", "training.micro_batch_size=4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run.yaml: OK\n")
    assert "llama-tiny, 158.0k parameters" in out
    assert "30 steps of 1,024 tokens, 30,720 in all" in out
    assert "16 sequences = 1 rank x 4 micro-batches of up to 4" in out
    assert "runs/run" in out


def test_check_of_a_run_whose_length_is_not_known(capsys):
    assert main(["config", "check", "run.yaml", "--no-data", "training.steps=null", "training.epochs=2"]) == 0
    assert "2 epochs" in capsys.readouterr().out


def test_check_counts_the_ranks_that_the_mesh_needs(capsys):
    assert main(["config", "check", "run.yaml", "--no-data", "parallel.dp_shard=8"]) == 0
    assert "8 ranks x 1 micro-batch of up to 2" in capsys.readouterr().out


def test_check_tells_all_problems_and_fails(capsys):
    assert main(["config", "check", "run.yaml", "--no-data", "optimizer.learning_rate=1", "training.steps=no"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "command line: optimizer.learning_rate: unknown key; did you mean 'lr'?",
        "command line: training.steps: must be an integer, not 'no'",
    ]


def test_check_of_a_run_directory_that_cannot_be_written(capsys, tmp_path, tiny_store, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "other.yaml").write_text(RUN.replace("store", str(tiny_store)) + "run: {directory: file/runs}\n")
    assert main(["config", "check", "other.yaml"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == f"other.yaml:4: run.directory: {tmp_path}/file is not a folder; set another\n"
    assert main(["config", "check", "other.yaml", "run.directory=new/runs"]) == 0
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert main(["config", "check", "other.yaml", "run.directory=new/runs"]) == 2
    wanted = f"command line: run.directory: this user cannot write into {tmp_path}; set another folder\n"
    assert capsys.readouterr().err == wanted
    assert main(["config", "check", "other.yaml", "run.directory=new/runs", "--no-data"]) == 0


def test_show_prints_yaml_that_loads(capsys, tmp_path):
    assert main(["config", "show", "run.yaml", "--no-data", "run.seed=5"]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    again = RunConfig.load("again.yaml", check_data=False)
    assert again == RunConfig.load("run.yaml", ["run.seed=5"], check_data=False)
    assert main(["config", "show", "run.yaml", "--no-data", "--origin", "run.seed=5"]) == 0
    assert "# command line" in capsys.readouterr().out


def test_schema(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "A Weft run"
    assert main(["config", "schema", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Configuration\n")


def test_a_missing_or_wrong_sub_verb(capsys):
    assert main(["config"]) == 2
    assert " check " in capsys.readouterr().err
    assert main(["config", "chekc", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("weft config: ", "'chekc'", "did you mean 'check'?", "weft config --help"))
    assert main(["config", "check"]) == 2
    assert capsys.readouterr().err == "weft config check: required: FILE (weft config check --help)\n"


def test_check_needs_no_torch():
    program = "import sys; from weft.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", program, "config", "check", "run.yaml", "--no-data"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
