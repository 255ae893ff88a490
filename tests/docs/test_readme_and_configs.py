"""README and configs/ are true: their commands run, their files load."""

import re
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.config.run import RunConfig
from weft.errors import ConfigError

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_example_configs_load(path):
    if path.name == "base.yaml":  # what others extend: it lacks a model, and nothing else
        with pytest.raises(ConfigError) as problem:
            RunConfig.load(path, check_data=False)
        assert len(problem.value.problems) == 1
        return
    if "model.from=" in path.read_text():  # needs a model; test_tuning_page.py trains with it
        return
    config = RunConfig.load(path, ["model.vocab_size=32000"], check_data=False)
    assert config.model.vocab_size == 32000
    assert len(path.read_text().splitlines()) <= 30


def test_the_readmes_commands_train_a_model(tmp_path, monkeypatch, capsys, tiny_corpus):
    """The block under "Train your own", as it stands, on a small corpus and for a few steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").symlink_to(tiny_corpus / "train")
    yaml = re.search(r"```yaml\n(.*?)```", README, re.S).group(1)
    (tmp_path / "run.yaml").write_text(yaml)
    block = README[README.index("## Train your own") :]
    commands = re.findall(r"^\$ weft (.*)$", block[: block.index("```yaml")], re.M)
    assert [c.split()[0] for c in commands] == ["data", "data", "train", "generate", "report"]
    small = (
        " model=llama-tiny training.tokens=512 training.batch_tokens=256 training.micro_batch_size=1 log.trackers=[]"
    )
    for command in commands:
        if command.startswith("train"):
            command += small
        command = command.replace("--vocab-size 8192", "--vocab-size 400")
        words = [w.strip('"') for w in re.findall(r'"[^"]*"|\S+', command)]
        assert main(words) == 0, (command, capsys.readouterr().err)
    assert (tmp_path / "runs" / "run" / "report.html").exists()


def test_the_readmes_library_example_runs(tmp_path, run_yaml, monkeypatch, tiny_corpus, tiny_tokenizer, tiny_heldout):
    import torch

    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    path = run_yaml(training={"steps": 6}, run={"name": "run", "directory": "runs"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs.jsonl").symlink_to(tiny_corpus / "train" / "more.jsonl")
    (tmp_path / "tok").symlink_to(tiny_tokenizer)
    (tmp_path / "heldout").symlink_to(tiny_heldout)
    assert path == tmp_path / "run.yaml"
    names: dict = {}
    exec(code.replace('["training.steps=100"]', '["training.steps=6"]'), names)
    assert names["model"](torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 512)
    assert isinstance(names["text"], str)
    assert 0 < names["loss"] < 10
    assert (tmp_path / "exported" / "config.json").is_file()
