"""docs/evaluation.md is true: its tasks and commands as they stand, on a small run."""

import json
import re
import shlex
from pathlib import Path

import peft
import pytest
from evaluation_cases import random_llama

from weft.cli.main import main

TEXT = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


@pytest.fixture
def place(tmp_path, run_yaml, tiny_heldout, tiny_store, tiny_tokenizer, monkeypatch):
    """A folder with all that the page names."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(run_yaml(training={"steps": 6}, run={"name": "run", "directory": "runs"}))]) == 0
    Path("heldout").symlink_to(tiny_heldout)
    Path("other").symlink_to(tiny_store)
    base = random_llama(Path("path/to/hf-folder"), 512)
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained("path/to/peft-folder")
    for file in tiny_tokenizer.iterdir():
        Path("path/to/hf-folder", file.name).write_bytes(file.read_bytes())
    Path("tasks").mkdir()
    yaml = re.findall(r"```yaml\n(task: (\w+)\n.*?)```", TEXT, re.S)
    assert [name for _, name in yaml] == ["capitals", "stories"]
    for content, name in yaml:
        Path("tasks", f"{name}.yaml").write_text(content)
    Path("tasks/capitals.jsonl").write_text(re.search(r"```json\n(.*?)```", TEXT, re.S)[1])
    return tmp_path


def test_the_pages_commands(place, capsys, monkeypatch):
    commands = re.findall(r"^\$ weft (.*?)(?:  +#.*)?$", TEXT, re.M)
    assert len(commands) == 7
    capsys.readouterr()
    for command in commands:
        if "--tasks" in command:
            pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
            monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # takes seconds
            monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", place / "cache")
        assert main(shlex.split(command)) == 0, command
        shown = capsys.readouterr().out
        assert all(part in shown for part in (["acc_norm"] if "--tasks" in command else ["heldout", "bits per byte"]))
    assert json.loads(Path("scores.json").read_text())["stride"] == 256


def test_the_pages_lines_of_python(place, capsys):
    code = re.search(r"```python\n(.*?)```", TEXT, re.S)[1]
    names: dict = {}
    exec(code, names)
    assert str(names["found"].loss) in capsys.readouterr().out
