"""`weft parallelize`: plans of modules in a file, files that it writes, and errors in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.planner.parallelize.read import read_plan

ROOT = Path(__file__).parent.parent.parent
SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, inner=64):
        super().__init__()
        self.up, self.down = nn.Linear(32, inner), nn.Linear(inner, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())

def other():
    return Net(inner=128)

def example():
    return (torch.randn(1, 8, 32),)

wrong = (torch.randn(1, 8, 31),)
nothing = ()

def sized(inner):
    return Net(inner)

class Branch(Net):
    def forward(self, x):
        if x.sum() > 0:
            return self.down(self.up(x))
        return x
"""
OPERATIONS = """
import weft, my

@weft.register_op("b l d^, n d^ -> b l n")
def project(x, weight):
    return x @ weight.T

@weft.register_op("b l d -> b l d")
def weights(x):
    return x.softmax(-1)

class Right(my.Net):
    def forward(self, x):
        return self.down(project(x, self.up.weight))

class Wrong(Right):
    def forward(self, x):
        return super().forward(weights(x))
"""
CHECK = """
import torch, my, plan
torch.manual_seed(0)
reference, model = my.Net().double(), None
import copy
model = plan.apply(copy.deepcopy(reference))
x = my.example()[0].double()
assert torch.allclose(reference(x), model(x), rtol=0, atol=1e-12)
import sys
assert not [name for name in sys.modules if name == "weft" or name.startswith("weft.")]
try:
    plan.apply(my.other())
except ValueError as error:
    assert "another module" in str(error)
else:
    raise AssertionError("a plan for another module was applied")
"""


@pytest.fixture
def my(tmp_path, monkeypatch):
    (tmp_path / "my.py").write_text(SOURCE)
    (tmp_path / "operations.py").write_text(OPERATIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my", "operations"):
        sys.modules.pop(name, None)
    yield tmp_path
    for name in ("my", "operations"):
        sys.modules.pop(name, None)


def test_a_plan_is_written_as_python_without_weft_and_read_after_edits(my, capsys):
    words = ["parallelize", "my:Net", "--inputs", "my:example", "--devices", "1", "--out", "plan.py", "--explain"]
    assert main([*words, "--picture", "plan.svg"]) == 0
    printed = capsys.readouterr().out
    assert "dp 1 x tp 1 = 1 devices" in printed
    assert "plan.py: dp 1 x tp 1" in printed
    assert (my / "plan.svg").read_text().startswith("<svg")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    first = read_plan("plan.py")
    text = (my / "plan.py").read_text()
    assert "PARAMETERS = {}" in text
    (my / "edited.py").write_text(
        text.replace("PARAMETERS = {}", 'PARAMETERS = {"up.*": Shard(0)}').replace("1, 1", "1, 2")
    )
    edited = read_plan("edited.py")
    assert (edited.tp, edited.parameters["up.*"].dim) == (2, 0)
    assert first.structure == edited.structure
    assert main(["parallelize", "--diff", "plan.py", "edited.py"]) == 0
    assert capsys.readouterr().out.splitlines() == ["tp: 1 -> 2", "parameters: up.*: none -> Shard(0)"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("my:Net --devices 2", "--inputs is required"),
        ("my:Net --inputs my:nothing --devices 2", "example_inputs has no tensor"),
        ("my:Net --inputs my:wrong --devices 2", "my.py:11: Net does not run with the example inputs"),
        ("my:Net --inputs my:example --devices 0", "devices=0 is not supported"),
        ("my:Net --inputs my:example --devices 3", "the example inputs have 1 rows, which 3 devices cannot share"),
        ("my:Net --inputs my:example --devices 2 --memory 1kB", "memory='1kB' is not a size; give for example 70GB"),
        ("my:Net --inputs my:example --devices 2 --memory 0.001MB", "Net does not fit 2 devices with 1 kB"),
        ("my:Net --inputs my:example --devices 2 --hardware h10", "no hardware file 'h10'"),
        ("my:Net --inputs my:example --devices 1 --out plan.txt", "the name of a plan ends with .py or .json"),
        ("my:sized --inputs my:example --devices 2", "my:sized needs inner"),
        ("my:Nett --inputs my:example --devices 2", "has no 'Nett'"),
        ("my:Net --inputs my:example --verify-ops", "Net calls no operation of weft.register_op"),
        ("my:Net --inputs my:example --verify-ops --out plan.py", "--verify-ops does not use --out"),
        ("operations:Right --inputs my:wrong --verify-ops", "Right does not run on the CPU in float64"),
        ("--diff a.py b.py", "a.py: No such file or directory"),
        ("--diff a.py b.py --devices 2", "--diff does not use --devices"),
        ("my:Net --inputs my:example --verify plan.py --out other.py", "--verify does not use --out"),
        ("my:Net --inputs my:example --devices 1 --out my.py", "my.py: this file was not written by"),
        ("--diff binary.py my.py", "binary.py: not UTF-8"),
        ("--diff folder my.py", "folder: Is a directory"),
    ],
)
def test_mistakes_are_reported_in_one_line(my, capsys, words, message):
    (my / "binary.py").write_bytes(b"\xff\xfe")
    (my / "folder").mkdir()
    assert main(["parallelize", *words.split()]) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed
    assert "\n" not in printed


def test_an_edited_plan_is_not_overwritten(my, capsys):
    words = ["parallelize", "my:Net", "--inputs", "my:example", "--devices", "1", "--out", "plan.py"]
    assert [main(words), main(words)] == [0, 0]
    edited = (my / "plan.py").read_text().replace("RECOMPUTE = []", 'RECOMPUTE = ["up"]')
    (my / "plan.py").write_text(edited)
    assert main(words) == 2
    assert "plan.py: this file was not written by `weft parallelize`, or was edited" in capsys.readouterr().err
    assert (my / "plan.py").read_text() == edited


def test_a_table_that_cannot_be_read_is_reported_with_its_line(my, capsys):
    assert main(["parallelize", "my:Net", "--inputs", "my:example", "--devices", "1", "--out", "plan.py"]) == 0
    lines = (my / "plan.py").read_text().splitlines()
    place = next(number for number, line in enumerate(lines, start=1) if line.startswith("INPUTS"))
    lines[place - 1] = 'INPUTS = {"up": Shard(dim=0)}'
    (my / "bad.py").write_text("\n".join(lines))
    assert main(["parallelize", "--diff", "plan.py", "bad.py"]) == 2
    assert f"bad.py:{place}: INPUTS: 'Shard(dim=0)' is no placement" in capsys.readouterr().err


def test_annotations_are_tried_on_the_calls_of_a_module(my, capsys):
    assert main(["parallelize", "operations:Right", "--inputs", "my:example", "--verify-ops"]) == 0
    assert capsys.readouterr().out == "project, 'b l d^, n d^ -> b l n': right (not tried, of size 1: b)\n"
    assert main(["parallelize", "operations:Wrong", "--inputs", "my:example", "--verify-ops"]) == 1
    wrong, line, right = capsys.readouterr().out.splitlines()
    assert wrong.startswith("weights, 'b l d -> b l d': WRONG")
    assert line == "  d: parts do not give the results of the whole; write d^"
    assert ": right" in right


def test_branches_on_values_run_on_plain_tensors(my, capsys):
    assert main(["parallelize", "my:Branch", "--inputs", "my:example", "--devices", "1"]) == 0
    shown = capsys.readouterr()
    assert "my.py:27: Branch depends on values of tensors" in shown.out
    assert shown.err.startswith("warning: the whole module runs on plain tensors: ")
    assert "write it with torch.where" in shown.err


@pytest.mark.matrix
def test_an_edited_plan_is_verified(my, capsys):
    assert main(["parallelize", "my:Net", "--inputs", "my:example", "--devices", "2", "--out", "plan.py"]) == 0
    text = (my / "plan.py").read_text()
    tables = text.partition("\nPARAMETERS = ")[0] + '\nPARAMETERS = {"up.*": Shard(0), "down.weight": Shard(1)}\n'
    (my / "plan.py").write_text(tables + "INPUTS = {}\nOUTPUTS = {}\nISLANDS = {}\nRECOMPUTE = []\n")
    capsys.readouterr()
    assert main(["parallelize", "--verify", "plan.py"]) == 0
    printed = capsys.readouterr().out
    assert "all_reduce" in printed
    assert printed.endswith("\nequal\n")


def test_a_plan_without_its_module_is_not_verified(my, capsys):
    (my / "plan.py").write_text("")
    assert main(["parallelize", "--verify", "plan.py"]) == 2
    assert "--verify needs the module" in capsys.readouterr().err
