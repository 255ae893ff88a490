"""The tutorials: commands run on small data, YAML files are valid, the keys and words of outputs exist."""

import json
import re
import shlex
import shutil
import sys

import pytest
from tutorial import DOCS, FENCE, commands, files

from weft.cli.main import main

TUTORIALS = sorted(path.stem for path in (DOCS / "tutorials").glob("*.md"))
RUN = ("first-model", "my-data", "my-own-component", "from-the-trainer")  # the others: config check of their files
SMALL = ["training.epochs=null", "training.steps=2", "training.batch_tokens=512", "training.micro_batch_size=1"]
SHORT = "data.sequence_length=64"  # the stores of the tests are shorter than one sequence of the tutorials
FAILING = {
    "weft data pack bad.jsonl --tokenizer tok --out bad": "bad.jsonl:2: ",
    "weft config check run.yaml optimizer.learning_rate=1e-3": "optimizer.learning_rate",
    "weft config check run.yaml 'optimizer.betas=[0.9]'": "optimizer.betas",
    "weft config check big.yaml parallel.tp=6 --devices 8": "nearest legal: parallel: {tp: 8}",
}


def text(name: str) -> str:
    return (DOCS / "tutorials" / f"{name}.md").read_text("utf-8")


@pytest.fixture
def home(tmp_path, tiny_corpus, monkeypatch):
    """A working directory with small files of the names that the tutorials use."""
    speeches = [path.read_text() for path in sorted((tiny_corpus / "train").glob("*.txt"))]
    (tmp_path / "tinyshakespeare.txt").write_text("\n\n".join(speeches))
    shutil.copy(tiny_corpus / "train" / "more.jsonl", tmp_path / "c4_demo.jsonl")
    records = [{"instruction": "Say it.", "input": "", "output": speech[:80]} for speech in speeches[:100]]
    records[-1]["output"] = "very long " * 2000
    (tmp_path / "alpaca_en_demo.json").write_text(json.dumps(records))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def stores(home, tiny_tokenizer, tiny_store, tiny_heldout):
    """The same directory with tok, train and heldout."""
    for name, path in (("tok", tiny_tokenizer), ("train", tiny_store), ("heldout", tiny_heldout)):
        (home / name).symlink_to(path)
    return home


def small(command: str) -> list[str]:
    """The command's arguments, for small data and few steps."""
    words = shlex.split(re.sub(r"--vocab-size \d+", "--vocab-size 400", command))[1:]
    return [*words, *SMALL] if words[0] == "train" else words


def message_words(command) -> set[str]:
    """The words of a command's output, without sampled text and the example's documents."""
    verb = command.text.split()[1]
    shown = [line for line in command.output if not line.startswith(("document ", "..."))]
    if verb == "train":
        shown = [line for line in shown if re.search(r"parameters|validation loss", line)]
    return set() if verb == "generate" else plain_words(" ".join(shown))


def plain_words(text: str) -> set[str]:
    """The words of a text without numbers, units and digests; "thread" for "threads" too."""
    return {word.removesuffix("s") for word in re.findall(r"(?<!\w)[a-z]{3,}(?!\w)", text.lower())}


def run(command, capfd, *more: str) -> None:
    """Runs a command of a page; its output has the words that the page shows."""
    code, printed = main([*small(command.text), *more]), "".join(capfd.readouterr())
    assert code == (2 if command.text in FAILING else 0), f"$ {command.text}\n{printed}"
    assert FAILING.get(command.text, "") in printed
    missing = message_words(command) - plain_words(printed)
    assert not missing, f"$ {command.text}\n{printed}"


def run_page(name, home, capfd) -> None:
    for path, body in files(text(name)).items():
        (home / path).write_text(body.replace("warmup_steps: 10", "warmup_steps: 1"))
    ran = [command for command in commands(text(name)) if command.text.startswith("weft ")]
    assert ran
    for command in ran:
        run(command, capfd)


@pytest.mark.parametrize("name", ["first-model", "my-data"])
def test_the_commands_run_from_text(name, home, capfd):
    run_page(name, home, capfd)


def test_a_custom_component_trains(stores, capfd):
    run_page("my-own-component", stores, capfd)
    lines = [json.loads(line) for line in (stores / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert all(line["document_length"] >= 1 for line in lines)
    for module in ("lion", "document_length"):
        sys.modules.pop(module, None)


def test_a_transformers_folder_is_fine_tuned(home, tiny_tokenizer, capfd):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(home / "model")
    shutil.copytree(tiny_tokenizer, home / "model", dirs_exist_ok=True)
    run_page("from-the-trainer", home, capfd)
    assert type(AutoModelForCausalLM.from_pretrained(home / "fine-tuned")) is LlamaForCausalLM


@pytest.mark.parametrize("name", [name for name in TUTORIALS if name not in RUN])
def test_the_run_files_are_valid(name, stores, capfd):
    written = files(text(name))
    assert written
    for path, body in written.items():
        (stores / path).write_text(body)
        assert main(["config", "check", path, SHORT]) == 0, capfd.readouterr().err
    for command in commands(text(name)):
        run(command, capfd, SHORT)


@pytest.mark.parametrize("path", sorted(DOCS.glob("t*/*.md")), ids=lambda path: path.stem)
def test_the_keys_exist(path):
    """`section.key` in prose and tables is a key of docs/configuration.md."""
    reference = (DOCS / "configuration.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL))
    prose = FENCE.sub("", path.read_text("utf-8"))
    for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)\b(?!\()[^`]*`", prose):
        if section in sections and key != "yaml":  # run.yaml is a file
            assert re.search(rf"^\| `{key}` \||`{key}`", sections[section], re.MULTILINE), f"{section}.{key}"
