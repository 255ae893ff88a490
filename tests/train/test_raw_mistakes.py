"""Mistakes in raw data, in its templates and in its keys: one line each."""

# ruff: noqa: F811 (fixtures of another file)
import json
import re
import shutil

import pytest
from running import train
from safetensors.torch import load_file, save_file
from test_raw_data import RECORDS, alpaca, cache, prepared, raw_yaml, refused, store_of  # noqa: F401

from weft.cli.main import main
from weft.config.run import RunConfig
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "data", "said"),
    [
        (
            '{"instruction": "a", "output": "b"}\n{"instruction": "a"}',
            {},
            "my.jsonl:2: no field 'output'; fix the input",
        ),
        ('{"question": "a"}', {}, "data.train: PATH: the first records have no known layout (their keys: 'question')"),
        ('{"question": "a"}', {"fields": {"inputs": "x"}, "layout": "pairs"}, "data.fields.inputs: unknown field"),
        ('{"text": "a b c"}', {"train_on": "last"}, "data.train_on: no effect, because data.train (PATH) has texts"),
        ('{"chosen": "a", "rejected": "b", "prompt": "c"}', {}, "records of preferences, a chosen and a rej"),
        ('{"prompt": "a", "completion": "b"}', {"chat_template": "none"}, "data.chat_template none: not found; use a"),
        ('{"messages": [{"role": "user", "content": "a"}]}', {}, "my.jsonl:1: no assistant message"),
    ],
)
def test_mistakes_in_raw_data_are_one_line(raw_yaml, tmp_path, cache, content, data, said):
    path = tmp_path / "my.jsonl"
    path.write_text(content + "\n")
    said = said.replace("PATH", str(path))
    found = refused(raw_yaml(train=str(path), **data))
    assert said in found
    assert "--" not in found.replace("--on-error skip", "")
    assert not [entry for entry in cache.glob("[!.]*") if entry.name != "digests"]


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}},
        {"question": "a", "chosen": "b"},
        {"instruction": "a", "input": "c", "chosen": "b"},
        {"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"chosen": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}]},
    ],
)
def test_the_keys_named_for_preferences_learn_the_chosen_answer(raw_yaml, tmp_path, cache, record):
    path = tmp_path / "my.jsonl"
    path.write_text(json.dumps(record | {"rejected": record["chosen"]}))
    layout, fields = re.search(
        r"with data.layout: (\w+) and data.fields: (\{.*\})", refused(raw_yaml(train=str(path)))
    ).groups()
    config = prepared(raw_yaml(train=str(path)), f"data.layout={layout}", f"data.fields={fields}")
    store = store_of(config)
    text = Tokenizer.load(config.tokenizer).decode(store.document(0).tolist())
    assert "assistant\nb<|im_end|>" in text
    assert "user\na\nc<" in text if "input" in record else "user\na<" in text


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template in this folder; set data.chat_template to a file or a built-in template (chatml, "),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "writes no assistant message"),
        (
            "{{ messages }}{% if false %}{% generation %}{% endgeneration %}{% endif %}",
            "marks no text of the assistant",
        ),
    ],
)
def test_templates_that_teach_nothing_are_refused(raw_yaml, alpaca, hf_folder, tmp_path, cache, template, said):
    folder = shutil.copytree(hf_folder, tmp_path / "hf")
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    found = refused(raw_yaml(train=str(alpaca)), f"model.from={folder}")
    assert said in found
    assert "fix the input" not in found
    assert "skip" not in found


def test_data_without_a_document_name_the_key_and_the_remedy(raw_yaml, alpaca, tmp_path, cache):
    found = refused(raw_yaml(train=str(alpaca), sequence_length=4))
    assert found == (
        "data.train: all 8 conversations are longer than 4 tokens; "
        "raise data.sequence_length, or set data.overlong: truncate"
    )
    (tmp_path / "a.txt").write_bytes(b"\0")
    found = refused(raw_yaml(train=str(tmp_path / "a.txt")))
    assert found.startswith("data.train: no document in 1 file (skipped 1 binary)")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "PATH: empty, no record"),
        ("a.json", b"[]", "PATH: empty, no record"),
        ("a.json", b"[1, 2, 3]", "PATH:1: not a JSON object"),
        ("a.json", b'"hello"', "not a JSON object"),
        ("a.json", bytes(range(128, 256)), "PATH: truncated or broken JSON"),
        ("a.csv", b"instruction;input;output\na;b;c\n", "separated by semicolons ('instruction;input;output')"),
        ("a.json", b'{"data": [{"instruction": "a", "output": "b"}]}', "the records are in the list 'data'"),
    ],
)
def test_files_without_records_are_refused_for_that_reason(raw_yaml, tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    found = refused(raw_yaml(train=str(path)))
    assert found.startswith("data.train: ")
    assert said.replace("PATH", str(path)) in found


def test_empty_answers_are_counted_in_a_warning(raw_yaml, alpaca, cache, capsys):
    alpaca.write_text(json.dumps([*RECORDS[:2], RECORDS[3], RECORDS[3] | {"output": ""}]))
    assert train(raw_yaml(train=str(alpaca)), "training.steps=1") == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "empty answer" in line]
    (line,) = warned
    assert line.startswith("warning: data.train: 1 conversation of 4: with an empty answer")


def test_keys_and_paths_are_checked_before_anything_is_read(raw_yaml, alpaca, tmp_path, tiny_store, hf_folder, capsys):
    def told(*overrides, **data):
        with pytest.raises(ConfigError) as caught:
            RunConfig.load(raw_yaml(**data), list(overrides))
        return list(map(str, caught.value.problems))

    (found,) = told(train=str(tiny_store), train_on="last")
    assert "demo.yaml:3: data.train_on: no effect, because a token store is packed already" in found
    (found,) = told(train=str(tmp_path / "none.json"), chat_template="plain")
    assert "none.json: no such token store or file; check the path" in found
    (found,) = told(train=str(tmp_path / "*.nothing"))
    assert "no file matches this pattern" in found
    (found,) = told(train={"a": {"path": str(alpaca), "weight": 1}})
    assert "data.train.type: required: " in found
    assert "list of {store: PATH, weight: ...}" in found
    (found,) = told(train="-")
    assert "the standard input can be read only once" in found
    file = raw_yaml(train=str(alpaca), validation={"texts": str(alpaca)})
    assert main(["config", "check", str(file)]) == 0
    said = capsys.readouterr().out
    assert "records: alpaca (instruction, input, output); template: " in said
    assert "packed when the run starts" in said
    config = json.loads((hf_folder / "config.json").read_text()) | {"vocab_size": 300}
    small = shutil.copytree(hf_folder, tmp_path / "small")
    (small / "config.json").write_text(json.dumps(config))
    (found,) = told(f"model.from={small}", train=str(alpaca))
    assert "model.vocab_size: 300 is less than the 512 tokens of the tokenizer" in found


def test_mistakes_of_names_and_adapters_are_found_before_anything_is_packed(
    raw_yaml, alpaca, hf_folder, tmp_path, cache, monkeypatch, capsys
):
    file = raw_yaml(train=str(alpaca))
    assert train(file, "run.name=first", "adapter.r=2", "training.steps=1") == 0
    adapter, other = f"adapter.from={tmp_path / 'runs' / 'first'}", shutil.copytree(hf_folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 0.1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "empty"))
    head, only_frozen = "optimizer.lr_multipliers={lm_head: 2}", "'lm_head' matches only frozen parameters"
    for overrides, said in (
        (["training.freeze=[layer.0]"], "training.freeze: 'layer.0' matches no parameter's name; did you mean"),
        (["optimizer.lr_multipliers={lm_heat: 2}"], "optimizer.lr_multipliers: 'lm_heat' matches no parameter's name"),
        (["training.freeze=[lm_head]", head], only_frozen),
        (["adapter.r=2", head], only_frozen),
        (["training.freeze=['*']"], "the patterns freeze all parameters"),
        ([f"model.from={other}", adapter], "these are not the weights that the adapter was trained on"),
        ([f"model.from={other}", "run.name=first", "adapter.r=2"], "these are not the weights that the adapter was"),
        (["run.name=first", "adapter.r=3"], "adapter.r: 3, but the run was started with 2"),
        (["training.freeze=[layer.0]", "--nproc", "2"], "training.freeze: 'layer.0' matches no parameter's name"),
    ):
        capsys.readouterr()
        assert train(file, *overrides) == 2, said
        (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("demo.yaml")]
        assert said in line
    assert not (tmp_path / "empty" / "data").exists()
    assert train(file, "run.name=second", adapter, "training.steps=1") == 0


def test_the_weights_of_a_base_model_are_hashed_once(raw_yaml, alpaca, hf_folder, cache, monkeypatch):
    monkeypatch.setattr("weft.files.SETTLED", -10)  # so that the test need not wait
    file = raw_yaml(train=str(alpaca))
    assert train(file, "adapter.r=2", "training.steps=1") == 0
    monkeypatch.setattr("weft.checkpoint.base_model._tensor_digest", None)  # hashing would fail
    assert train(file, "adapter.r=2", "training.steps=2") == 0
