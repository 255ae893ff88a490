"""Hugging Face folders that are not whole, not known or not safe: one line each, and nothing is left behind."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_huggingface import SMALL, folder, theirs, weft_command

import weft
from weft.config.run import RunConfig
from weft.errors import ConfigError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("hf") / "whole", theirs())


def change(path, **keys):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | keys))


def tensors(path, edit):
    state = load_file(path / "model.safetensors")
    edit(state)
    save_file(state, path / "model.safetensors")


def eleven(state):
    for name in [name for name in state if "layers.0" in name or "layers.1" in name][:11]:
        del state[name]


def cut(path, end):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:end])


def deep(path):
    """A header of brackets alone, more of them than can be read."""
    text = b"[" * 100_000
    replace(path, "model.safetensors", len(text).to_bytes(8, "little") + text)


def offsets(path):
    """Two tensors said to be in one place."""
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    one, other = (f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
    header[one]["data_offsets"] = header[other]["data_offsets"]
    text = json.dumps(header).encode()
    replace(path, "model.safetensors", len(text).to_bytes(8, "little") + text + data[8 + length :])


def pickled(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def replace(path, name, data):
    (path / name).write_bytes(data)


MISTAKES = {
    "missing": (lambda p: tensors(p, lambda s: s.pop("model.norm.weight")), "model.norm.weight is missing"),
    "extra": (lambda p: tensors(p, lambda s: s.update(odd=torch.ones(2))), "odd does not belong to this model"),
    "misshaped": (
        lambda p: tensors(p, lambda s: s.update({"model.norm.weight": torch.ones(31)})),
        r"model.norm.weight has shape \[31\], but config.json .* \[32\]",
    ),
    "more than ten": (lambda p: tensors(p, eleven), "is missing; and 1 more"),
    "unknown": (
        lambda p: change(p, architectures=["LamaForCausalLM"]),
        "config.json: architectures: .* 'LamaForCausalLM'.* LlamaForCausalLM .*`model: .type: hf, path: ....`",
    ),
    "quantized": (lambda p: change(p, quantization_config={"quant_method": "gptq"}), "quantized .gptq."),
    "no config": (lambda p: (p / "config.json").unlink(), r"config\.json"),
    "empty config": (lambda p: replace(p, "config.json", b""), "config.json: the file is empty"),
    "broken config": (lambda p: replace(p, "config.json", b"{"), "config.json:1: invalid JSON"),
    "list as config": (lambda p: replace(p, "config.json", b"[]"), r"config\.json: .*mapping"),
    "heads": (
        lambda p: change(p, num_attention_heads=5, head_dim=None),
        "num_attention_heads: 5 heads do not",
    ),
    "negative": (
        lambda p: change(p, num_hidden_layers=-1),
        "config.json: num_hidden_layers: .* at least 1, not -1",
    ),
    "pickled": (pickled, "pickled .* safetensors.* weft import .*hf OUT --allow-pickle"),
    "half": (lambda p: cut(p, -1), r"model.safetensors: .*truncated: [\d,]+ bytes instead of [\d,]+; download"),
    "half a header": (lambda p: cut(p, 100), "truncated: .* header.*; download"),
    "empty": (lambda p: cut(p, 0), "the file is truncated.*; download"),
    "pointer": (
        lambda p: replace(p, "model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
        "Git LFS pointer.*; run git lfs pull",
    ),
    "web page": (lambda p: replace(p, "model.safetensors", b"<html>" * 99), "not a safetensors file"),
    "longer": (
        lambda p: replace(p, "model.safetensors", (p / "model.safetensors").read_bytes() + b"x"),
        "its header requires .*; download",
    ),
    "offsets": (lambda p: offsets(p), r"model.safetensors: .*wrong offsets for model.layers.\d.\S+; download"),
    "layers": (
        lambda p: change(p, num_hidden_layers=9000),
        "num_hidden_layers is 9,000, but the files have only 21 .*; download",
    ),
    "header": (lambda p: deep(p), "model.safetensors: not a safetensors file"),
    "architecture": (lambda p: change(p, architectures="Nonsense"), "architectures: .*'Nonsense'"),
    "a run": (lambda p: ((p / "config.json").unlink(), (p / "model.json").touch()), "hf: .*checkpoint of Weft"),
    "nothing": (lambda p: shutil.move(p, p.parent / "elsewhere"), "there is no such folder"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no model.safetensors.* download"),
    "foreign tokenizer": (
        lambda p: replace(p, "tokenizer.json", json.dumps({"model": {"vocab": {"a": 0, "b": 900}}}).encode()),
        "tokenizer.json: .* 901 tokens, but .* 512 rows; use the tokenizer",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(tmp_path, whole, capsys, case):
    damage, message = MISTAKES[case]
    path = shutil.copytree(whole, tmp_path / "hf")
    damage(path)
    assert weft_command("import", path, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(message, said), said
    assert not {"out", ".out.partial"} & {entry.name for entry in tmp_path.iterdir()}


def test_shards_that_lack(tmp_path, capsys):
    path = folder(tmp_path / "hf", theirs(), shards=SMALL)
    second = sorted(path.glob("model-00002-*"))[0]
    second.rename(tmp_path / "gone")
    assert weft_command("import", path, tmp_path / "out") == 2
    assert f"{second}: this file, which model.safetensors.index.json lists, is missing" in capsys.readouterr().err
    (tmp_path / "gone").rename(second)
    (path / "model.safetensors.index.json").unlink()
    assert weft_command("import", path, tmp_path / "out") == 2
    assert "model.safetensors.index.json, the index of model-00001-" in capsys.readouterr().err


def test_warnings(tmp_path, whole, tiny_tokenizer, capsys):
    path = shutil.copytree(whole, tmp_path / "hf")
    change(path, pad_token_id=512)
    assert weft_command("import", path, tmp_path / "one") == 0
    said = capsys.readouterr().err
    assert "pad_token_id is 512, but the model has only 512 tokens" in said
    assert "tokenizer.json is missing" in said
    for file in tiny_tokenizer.iterdir():
        shutil.copy(file, path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 515, "content": "<far>"})
    (path / "tokenizer.json").write_text(json.dumps(content))
    assert weft_command("import", path, tmp_path / "two") == 0
    assert "ids beyond the model's 512 rows; do not use them: <far>" in capsys.readouterr().err
    assert (tmp_path / "two" / "tokenizer" / "tokenizer.json").exists()
    assert weft_command("generate", tmp_path / "one", "hello") == 2
    assert "no tokenizer.json with this model" in capsys.readouterr().err


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path, whole, capsys, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    assert weft_command("import", whole, tmp_path / "out") == 2
    assert "already exists; choose another folder" in capsys.readouterr().err
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["mine"]

    def full(*args):
        raise OSError(28, "No space left on device")

    assert weft_command("import", whole, tmp_path / "good") == 0
    monkeypatch.setattr("weft.checkpoint.storage.write_safetensors", full)
    monkeypatch.setattr("weft.checkpoint.shard_files.write_safetensors", full)
    for verb, source in (("import", whole), ("export", tmp_path / "good")):
        capsys.readouterr()
        assert weft_command(verb, source, tmp_path / "new") == 2
        assert "No space left on device" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["good", "out"]


def test_a_damaged_import(tmp_path, whole, capsys):
    assert weft_command("import", whole, tmp_path / "ours") == 0
    shard = next((tmp_path / "ours").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert weft_command("export", tmp_path / "ours", tmp_path / "out") == 2
    assert f"{shard}: damaged checkpoint: the contents" in (said := capsys.readouterr().err)
    assert "`weft import`" in said


def test_export_of_what_cannot_be(tmp_path, whole, capsys):
    for words, what in (
        (["--max-shard-size", "5 pages"], "--max-shard-size 5 pages: "),
        (["--dtype", "float8"], "dtype 'float8': use one of float32, "),
        (["--to", "gguff"], "there is no export 'gguff'; did you mean 'gguf'?"),
        (["--to", "nowhere:export"], "'nowhere:export': no module 'nowhere'"),
        (["--to", "weft.errors:__doc__"], "is not an export format"),
        (["quantization=q8"], "quantization: not an option of the format hf; its options are dtype, max_shard_size"),
        (["q8"], "'q8' is not key=value"),
    ):
        assert weft_command("export", whole, tmp_path / "out", *words) == 2
        assert what in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_in_a_run_file(tmp_path, whole, run_yaml):
    """The checks of a run file see the folder's shape, and its mistakes at the key that names it."""

    def load(**model):
        yaml = run_yaml(model=None)
        yaml.write_text(yaml.read_text() + f"model: {json.dumps(model)}\n")
        return RunConfig.load(yaml)

    config = load(**{"from": str(whole)})
    assert (config.model.hidden_size, config.model.vocab_size, config.model.family) == (32, 512, "llama")
    for more, message in (
        ({"load_optimizer": True}, "model.load_optimizer: .*Hugging Face"),
        ({"hidden_size": 64}, "model.hidden_size: .* 32.*model.from"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(**{"from": str(whole)}, **more)
    path = shutil.copytree(whole, tmp_path / "hf")
    change(path, architectures=["LamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"model.from: .*config.json: architectures: .*'LamaForCausalLM'"):
        load(**{"from": str(path)})


def test_a_model_that_no_family_can_be(tmp_path, capsys):
    from checkpoint_cases import write

    from weft.config.model import ModelSection
    from weft.models.build import build_model

    section = ModelSection(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, logit_softcap=5.0)
    write(tmp_path, build_model(section), None, architecture=section.model_dump(mode="json", by_alias=True))
    assert weft_command("export", tmp_path, tmp_path / "out") == 2
    assert "model.logit_softcap is 5.0" in capsys.readouterr().err
    with pytest.raises(weft.UserError, match="does not exist; give a run"):
        weft.load_model(tmp_path / "nothing")
