"""docs/tuning/own-loop.md is true: its programs run, also on two ranks, and its keys and attributes exist."""

import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
import types
from pathlib import Path

import pytest
from tutorial import DOCS, check_style, commands, files, losses

import weft

ROOT = Path(__file__).parents[2]
TEXT = (DOCS / "tuning" / "own-loop.md").read_text("utf-8")
FILES = files(TEXT)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's files, in the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_rewards", None)


def test_the_files_are_short_and_in_the_houses_style(page):
    programs = {"my_loop.py", "my_rewards.py", "my_reward_loop.py", "my_policy_loop.py", "my_fabric.py"}
    assert set(FILES) == {"run.yaml", *programs}
    assert all(len(text.splitlines()) <= 24 for text in FILES.values())
    check_style()


@pytest.mark.xdist_group("ranks")
def test_the_loop_is_the_same_on_two_ranks_and_resumes(page, capfd, ranks):
    from pool import run_program

    loop, on_ranks, *_ = commands(TEXT)
    assert loop.text == "python my_loop.py"
    runpy.run_path("my_loop.py")
    printed = capfd.readouterr().err
    shown = [re.sub(r"(loss) .*|\(\d+ threads?\)", r"\1", line) for line in loop.output]
    assert all(line.strip() in printed for line in shown), printed
    one = losses(page / "runs/run")
    assert len(one) == 20
    assert one[-1] < one[0]
    (page / "runs").rename(page / "one")
    words = shlex.split(on_ranks.text)
    assert words == ["torchrun", "--nproc-per-node", "2", "my_loop.py"]
    printed = ranks.call(run_program, 2, page, "my_loop.py")  # as torchrun starts it
    assert "".join(printed).count("step 10: loss") == 1
    assert losses(page / "runs/run") == pytest.approx(one, rel=0, abs=1e-4)
    shutil.rmtree(page / "runs/run/checkpoints/step-00000020")
    runpy.run_path("my_loop.py")  # one rank goes on from what two have saved
    assert losses(page / "runs/run") == pytest.approx(one, rel=0, abs=1e-4)


def test_the_new_algorithm_learns_what_is_rewarded(page):
    assert commands(TEXT)[2].text == "python my_reward_loop.py"
    runpy.run_path("my_reward_loop.py")
    found = losses(page / "runs/rewards")
    assert sum(found[-5:]) < sum(found[:5])
    lines = [json.loads(line) for line in (page / "runs/rewards/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["learned_tokens"] == 16  # an answer of one byte each


def test_a_policy_learns_what_is_rewarded(page, capfd):
    shown = commands(TEXT)[-1]
    assert shown.text == "python my_policy_loop.py"
    runpy.run_path("my_policy_loop.py")
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 10
    rewards = [[float(re.search(r"reward (.*),", line)[1]) for line in some] for some in (lines, shown.output)]
    assert rewards[0][0] == pytest.approx(rewards[1][0], abs=0.1)
    assert min(rewards[0][-1], rewards[1][-1]) > 0.95


def test_the_model_in_fabric(page, monkeypatch):
    """Of `lightning`, or of the smaller package `lightning-fabric`, whose module has another name."""
    if importlib.util.find_spec("lightning") is None:
        monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
        monkeypatch.setitem(sys.modules, "lightning.fabric", pytest.importorskip("lightning_fabric"))
    runpy.run_path("my_loop.py")
    runpy.run_path("my_fabric.py")


def test_the_keys_and_attributes_exist():
    reference = (DOCS / "configuration.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL))
    found = re.findall(r"`([a-z]+)\.([a-z_]+)[^`]*`", TEXT)
    keys = [(section, key) for section, key in found if section in sections and f"{section}.{key}" != "optimizer.step"]
    assert len(keys) > 12
    for section, key in keys:
        assert re.search(rf"^\| `{key}` \|", sections[section], re.MULTILINE), f"{section}.{key}"
    for name in set(re.findall(r"`trainer\.(\w+)", TEXT)) - {"should_stop"}:
        assert hasattr(weft.Trainer, name), name
