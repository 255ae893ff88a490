"""`weft export` and `weft.export_model`: any source, and targets from outside."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import weft
from weft import export as targets
from weft import plugins
from weft.cli.main import main

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from test_huggingface import SMALL, folder, logits, tensors, theirs

TARGET = '''
"""Export to a table: a name, a dtype and a shape a line."""

from weft.checkpoint.weights import open_weights


def export(source, out, console, *, separator=" "):
    """Write a table of the tensors."""
    lines = []
    for name, saved in open_weights(source, huggingface=True).tensors.items():
        assert saved.full().shape == saved.shape
        lines.append(separator.join([name, str(saved.dtype), str(list(saved.shape))]))
    out.write_text("\\n".join(lines))
    return f"{len(lines)} tensors"
'''


def mixtral():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    config = MixtralConfig(
        **shape, vocab_size=512, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, sliding_window=None,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


@pytest.mark.parametrize(
    "make", [theirs, lambda: theirs(tie_word_embeddings=True), mixtral], ids=["llama", "tied", "moe"]
)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_of_a_hugging_face_folder_it_is_the_export_of_its_import(tmp_path, tiny_tokenizer, make, dtype):
    model = make()
    model.generation_config.eos_token_id = [1, 2]
    source = folder(tmp_path / "hf", model, tiny_tokenizer, SMALL)
    options = ["--dtype", dtype] if dtype else []
    assert main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "two"), "--max-shard-size", SMALL, *options]) == 0
    made = weft.export_model(source, tmp_path / "one", max_shard_size=SMALL, **({"dtype": dtype} if dtype else {}))
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert made.files == sum(name.endswith(".safetensors") for name in files) > 1
    if dtype is None:
        assert tensors(tmp_path / "one") == tensors(source)
        ids = torch.randint(0, 512, (2, 9))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
        assert torch.equal(logits(again, ids), logits(model, ids))


def test_targets_from_outside(tmp_path, monkeypatch, capsys):
    """By `module:function` from the working directory, and by a package's entry point; options by key=value."""
    source = folder(tmp_path / "hf", theirs())
    (tmp_path / "my_table.py").write_text(TARGET)
    info = tmp_path / "tables-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tables\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weft.plugins]\nexport.table = my_table\n")

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._installed.cache_clear()

    def weft_command(*words):
        capsys.readouterr()
        return main([str(word) for word in words]), *capsys.readouterr()

    done = weft_command("export", source, "a.txt", "--to", "my_table:export", "separator='|'")
    assert done == (0, f"a.txt: {len(tensors(source))} tensors\n", "")
    names = {line.split("|")[0] for line in (tmp_path / "a.txt").read_text().splitlines()}
    assert names == set(tensors(source))
    assert main(["import", str(source), str(tmp_path / "ours")]) == 0
    assert weft_command("export", "ours", "b.txt", "--to", "table")[0] == 0
    assert {line.split(" ")[0] for line in (tmp_path / "b.txt").read_text().splitlines()} == names
    done = weft_command("export", source, "c.txt", "--to", "table", "--dtype", "bfloat16")
    assert done == (2, "", "dtype: not an option of the format table; its options are separator\n")
    code, _, said = weft_command("export", source, "b.txt", "--to", "table")
    assert (code, said) == (2, "b.txt: already exists; choose another path, or move the existing one away\n")
    plugins._installed.cache_clear()


def test_help_lists_each_target_with_its_options_and_families(capsys):
    """Options are the keyword arguments of `export`, described by its docstring."""
    assert main(["export", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = plugins.built_ins(targets, "export")
    assert {"hf", "peft", "torch"} <= found.keys()
    for target, module in found.items():
        assert f"Families: {module.FAMILIES}" in said
        for name, argument in inspect.signature(module.export).parameters.items():
            if argument.kind is argument.KEYWORD_ONLY:
                assert re.search(rf"--{name.replace('_', '-')} .*?\b{target}\b[^:]*: ", said), (target, name)
    assert "--base BASE peft: name or path of the base model for adapter_config.json." in said


def test_mistakes_in_a_target_are_one_line(tmp_path, monkeypatch, capsys):
    source = folder(tmp_path / "hf", theirs())
    (tmp_path / "my_targets.py").write_text(
        "def two(source, out):\n    pass\ndef raises(source, out, console):\n    return {}['row']\n"
        "def needs(source, out, console, *, name):\n    pass\n"
        "def typed(source, out, console, *, huggingface=True, count: int = 1, rate: 'float | None' = None,"
        " name: str = '', data: 'Unknown' = None):\n    return huggingface, count, rate, name\n"
    )
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for target, said in (
        (
            "my_targets:two",
            "--to my_targets:two: too many positional arguments; Weft calls export(source, out, console",
        ),
        ("my_targets:raises", "my_targets.py:4: KeyError: 'row' (in --to my_targets:raises)\n"),
        ("my_targets:needs", "--to my_targets:needs: missing a required"),
        (
            "my_targets:",
            "--to my_targets:: the module my_targets has no function export(source, out, console, ...); add",
        ),
    ):
        assert main(["export", str(source), "out", "--to", target]) == 2
        told = capsys.readouterr().err
        assert told.startswith(said)
        assert told.count("\n") == 1
    for option, said in (
        ("huggingface=maybe", "huggingface: must be true or false, not 'maybe'"),
        ("huggingface=1", "huggingface: must be true or false, not 1"),
        ("count=true", "count: must be an integer, not True"),
        ("count=1.5", "count: must be an integer, not 1.5"),
    ):
        assert main(["export", str(source), "out", "--to", "my_targets:typed", option]) == 2
        assert capsys.readouterr().err == f"{said}\n"
    options = ["huggingface=false", "count=2", "data=[1]"]
    assert main(["export", str(source), "out", "--to", "my_targets:typed", *options]) == 0
    sys.modules.pop("my_targets", None)
