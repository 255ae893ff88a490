"""What lies beside a Hugging Face folder's weights: two sets of files, damaged documents, chat templates."""

import json
import shutil

import forked
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_huggingface import SMALL, folder, logits, theirs, weft_command

import weft

TOKENS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_tokenizer):
    return folder(tmp_path_factory.mktemp("hf") / "whole", theirs(), tiny_tokenizer)


def test_one_file_and_shards_in_one_folder(tmp_path, capsys):
    """The same choice as transformers', and it is told: by import, and where the folder is read directly."""
    path = folder(tmp_path / "hf", theirs(), shards=SMALL)
    other = folder(tmp_path / "other", theirs())
    state = {name: tensor * 0.5 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    expected = logits(transformers.AutoModelForCausalLM.from_pretrained(path), TOKENS)
    both = f"warning: {path}: both model.safetensors and model.safetensors.index.json "
    assert weft_command("import", path, tmp_path / "out") == 0
    assert capsys.readouterr().err.count(both) == 1
    assert (logits(weft.load_model(tmp_path / "out"), TOKENS) - expected).abs().max() < 1e-5
    assert weft_command("resize", path, tmp_path / "resized", "--vocab-size", "520") == 0
    assert capsys.readouterr().err.count(both) == 1
    assert weft_command("delta", "make", other, path, tmp_path / "delta") == 0
    assert capsys.readouterr().err.count(both) == 1
    assert weft_command("delta", "apply", other, tmp_path / "delta", tmp_path / "again") == 0
    assert not (tmp_path / "again" / "model.safetensors.index.json").exists()
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == state.keys()
    with pytest.warns(UserWarning, match="both model.safetensors and"):
        weft.load_model(path)


def test_a_folder_read_directly_is_reported_in_one_line(tmp_path):
    path = folder(tmp_path / "hf", theirs(), shards=SMALL)
    shutil.copy(folder(tmp_path / "other", theirs()) / "model.safetensors", path)
    done = forked.run(path, program=PROGRAM)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 2, said
    assert said[0].startswith(f"warning: {path}: both model.safetensors and")
    assert said[1].endswith("UserWarning: another's")


PROGRAM = """
import sys, warnings
from weft.cli.main import one_line_warnings
import weft
with one_line_warnings():
    weft.load_model(sys.argv[1])
    warnings.warn("another's")
"""

DAMAGED = {
    "tokenizer_config.json": b"[]",
    "special_tokens_map.json": b"[]",
    "special_tokens_map.json (empty)": b"",
    "special_tokens_map.json (binary)": b"\xff\xfe\x00\x81",
    "generation_config.json": b"[]",
    "generation_config.json (half)": b'{"eos',
    "chat_template.json": b"3",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_documents(tmp_path, whole, capsys, case):
    path = shutil.copytree(whole, tmp_path / "hf")
    name = case.partition(" ")[0]
    (path / name).write_bytes(DAMAGED[case])
    for verb in (["import"], ["resize", "--vocab-size", "600"]):
        assert weft_command(*verb, path, tmp_path / "out") == 2
        said = capsys.readouterr().err
        assert said.startswith(f"{path / name}"), said
        assert said.count("\n") == 1, said
        assert not (tmp_path / "out").exists()


TEMPLATES = {
    "number": (5, "chat_template in tokenizer_config.json is neither a text nor a list of named templates"),
    "syntax": ("a\n{% for x in %}", "the chat template (tokenizer_config.json) is invalid: line 2: "),
    "named": (
        [{"name": "default", "template": "x"}, {"name": "rag", "template": "{{ x"}],
        "the chat template 'rag' (tokenizer_config.json) is invalid: line 1: ",
    ),
    "good": ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_broken_chat_templates(tmp_path, whole, capsys, case):
    path = shutil.copytree(whole, tmp_path / "hf")
    template, told = TEMPLATES[case]
    stated = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(stated | {"chat_template": template}))
    assert weft_command("import", path, tmp_path / "out") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == (told is not None), said
    assert told is None or said[0].startswith(f"warning: {path}: {told}"), said


def test_several_chat_templates_travel(tmp_path, tiny_tokenizer):
    """As transformers saves them, through import, delta and export, to what transformers loads."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny_tokenizer / "tokenizer.json"))
    named = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ messages[0].content }}"}
    tokenizer.chat_template = named
    path = folder(tmp_path / "hf", theirs())
    tokenizer.save_pretrained(path)
    assert (path / "additional_chat_templates" / "tool_use.jinja").exists()
    assert weft_command("import", path, tmp_path / "ours") == 0
    assert weft_command("export", tmp_path / "ours", tmp_path / "back") == 0
    assert weft_command("delta", "make", path, path, tmp_path / "delta") == 0
    assert weft_command("delta", "apply", path, tmp_path / "delta", tmp_path / "again") == 0
    for made in ("back", "again"):
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / made).chat_template == named


def test_a_folder_without_tokenizer_is_named_once(tmp_path, capsys):
    path = folder(tmp_path / "hf", theirs())
    assert weft_command("resize", path, tmp_path / "out", "--vocab-size", "600") == 0
    said = capsys.readouterr().err
    assert f"warning: {path}: tokenizer.json is missing" in said
    assert said.count(str(path)) == 1


@pytest.mark.parametrize(("held", "most"), [(2**30, 30), (0, 200)])
def test_a_file_of_many_experts_is_not_opened_for_each(tmp_path, monkeypatch, held, most):
    """But again after so many bytes, since pages that were read stay in memory until it is closed."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2}
    config = transformers.OlmoeConfig(num_hidden_layers=2, num_experts=16, num_experts_per_tok=2, **sizes)
    torch.manual_seed(0)
    model = transformers.OlmoeForCausalLM(config).eval()
    path = folder(tmp_path / "hf", model)
    opens = []

    def counted(*args, **kwargs):
        opens.append(args)
        return safe_open(*args, **kwargs)

    monkeypatch.setattr("weft.checkpoint.huggingface.pickled.safe_open", counted)
    monkeypatch.setattr("weft.checkpoint.huggingface.slices._CACHE_BYTES", held)
    assert weft_command("import", path, tmp_path / "out") == 0
    assert most / 2 < len(opens) < most
    tokens = torch.arange(20)[None]
    for made in (tmp_path / "out", path):
        assert (logits(weft.load_model(made), tokens) - logits(model, tokens)).abs().max() < 1e-5
