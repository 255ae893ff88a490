"""The page about `weft.parallelize`: its commands, and the plan that it promises."""

import shlex
import sys

import pytest
from torch.distributed.tensor import Shard
from tutorial import DOCS, commands, files

from weft.cli.main import main
from weft.planner.parallelize.read import read_plan

PAGE = (DOCS / "parallelize.md").read_text()


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, text in files(PAGE).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my", None)
    yield tmp_path
    sys.modules.pop("my", None)


def test_commands_of_the_page(here, capsys):
    for command in commands(PAGE):
        assert main(shlex.split(command.text)[1:]) == 0, command.text
    differences = capsys.readouterr().out
    assert "step_seconds: " in differences
    plan = read_plan("plan.py")
    assert plan.devices == 8
    splits = plan.parameters["layers.*.up.weight"], plan.parameters["layers.*.down.weight"]
    assert splits == (Shard(0), Shard(1))  # columns, then rows
    assert len((here / "plan.py").read_text().splitlines()) < 60
