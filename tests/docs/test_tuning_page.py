"""The recipes in configs/ and the pages of tuning: commands run on small data, and the table of memory is current."""

import json
import runpy
import shlex
from pathlib import Path

import pytest
from tutorial import DOCS, FENCE, commands, files

from weft.cli.main import main
from weft.config.run import RunConfig

ROOT = DOCS.parent
PAGE = DOCS / "tuning" / "index.md"
RECIPES = {"sft": "my.json", "lora": "my.json", "qlora": "my.json", "continued-pretraining": "texts"}
SMALL = ["training.epochs=null", "training.steps=2", "training.batch_tokens=256", "data.sequence_length=64"]


@pytest.fixture
def home(tmp_path, tiny_corpus, tiny_heldout, hf_folder, monkeypatch):
    """A working directory with the files and folders that the page names."""
    records = [{"instruction": f"Vo shi {n}?", "input": "", "output": "Kalo mi."} for n in range(40)]
    (tmp_path / "my.json").write_text(json.dumps(records))
    (tmp_path / "question.txt").write_text("Vo shi 3?\n")
    for name, path in {"configs": ROOT / "configs", "HF_DIR": hf_folder, "texts": tiny_corpus / "train"}.items():
        (tmp_path / name).symlink_to(path)
    (tmp_path / "heldout").symlink_to(tiny_heldout)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(command: str) -> list[str]:
    """The command's arguments, for few steps and tokens."""
    words = shlex.split(command.removeprefix("weft "))
    more = {
        "train": [*SMALL, "log.trackers=[]"],
        "chat": ["--max-new-tokens", "2"],
        "generate": ["--max-new-tokens", "2"],
    }
    return [*words, *more.get(words[0], [])]


def test_the_pages_commands_run(home, monkeypatch, capsys):
    """All commands in the page's order: the four recipes, then the uses of their runs."""
    page = PAGE.read_text(encoding="utf-8")
    ran = [command.text for command in commands(page)]
    for recipe, data in RECIPES.items():
        path = ROOT / "configs" / f"{recipe}.yaml"
        command = f"weft train configs/{recipe}.yaml data.train={data} model.from=HF_DIR"
        assert f"#   {command}\n" in path.read_text()
        assert command in ran
        assert len(path.read_text().splitlines()) < 25
    for command in ran:
        monkeypatch.setattr("sys.stdin", (home / "question.txt").open())  # a message for weft chat
        assert main(small(command)) == 0, (command, capsys.readouterr().err)
    lines = {name: (home / "runs" / name / "metrics.jsonl").read_text().splitlines() for name in RECIPES}
    assert all(json.loads(line)["step"] == 2 for line in (found[-1] for found in lines.values()))
    assert (home / "for-peft" / "adapter_config.json").is_file()
    assert (home / "merged" / "chat_template.jinja").is_file()
    for path, body in files(page).items():
        Path(path).write_text(body)
        RunConfig.load(path, ["model.from=HF_DIR", "data.train=my.json"])


def test_the_commands_and_the_code_of_the_page_of_adapters(home, monkeypatch, capsys):
    page = (DOCS / "tuning" / "adapters.md").read_text(encoding="utf-8")
    (home / "more.json").symlink_to(home / "my.json")
    ran = [command.text for command in commands(page)]
    assert {words.split()[1] for words in ran} == {"train", "generate", "chat", "evaluate", "export", "merge"}
    (code,) = [body for info, body in FENCE.findall(page) if info == "python"]
    for command in ran:
        monkeypatch.setattr("sys.stdin", (home / "question.txt").open())
        assert main(small(command)) == 0, (command, capsys.readouterr().err)
    names: dict = {}
    exec(code, names)
    assert names["texts"].keys() == {None, "lora", "dora"}


def test_the_commands_of_the_page_of_quantization(home):
    page, path = (DOCS / "tuning" / "quantization.md").read_text(encoding="utf-8"), ROOT / "configs" / "qat.yaml"
    ran = [command.text for command in commands(page)]
    assert [words.split()[1] for words in ran] == ["train", "evaluate", "generate"]
    assert f"#   {ran[0]}\n" in path.read_text()
    assert len(path.read_text().splitlines()) < 25
    for command in ran:
        assert main(small(command)) == 0, command
    for name, body in files(page).items():
        Path(name).write_text(body)
        RunConfig.load(name)


@pytest.mark.parametrize(
    ("number", "model"),
    [
        (2, "Llama 3.2 1B"),
        pytest.param(3, "Llama 3.2 1B", marks=pytest.mark.long),
        pytest.param(4, "Llama 2 7B", marks=pytest.mark.long),
    ],
)
def test_the_table_of_memory_is_current(number, model):
    """Its first rows, which are fast to compute. `make docs` writes the table."""
    table = runpy.run_path(str(DOCS / "memory_table.py"))
    page = PAGE.read_text(encoding="utf-8")
    rows = page[page.index(table["BEGIN"]) : page.index(table["END"])].split("\n\n")[1].splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows[2::2]] == list(table["MODELS"])
    assert rows[number] + "\n" == table["row"](model, 1 if number % 2 == 0 else 8)
