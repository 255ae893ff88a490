"""The library: the public names, the examples in their docstrings, and what generate and evaluate give."""

import doctest
import gc
import inspect
import math
import shutil
import subprocess
import sys
import weakref

import forked
import pytest
import torch
from safetensors.torch import load_file, save_file

import weft
from weft.checkpoint.huggingface.peft_writer import write_peft
from weft.checkpoint.load import architecture
from weft.cli.main import main
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError

SHORT = {"training": {"steps": 4}, "schedule": {"warmup_steps": 0}, "log": {"trackers": []}}


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny_corpus, tiny_tokenizer, tiny_store, tiny_heldout):
    """The folder that the examples run in: docs.jsonl, tok, heldout, run.yaml, runs/run, hf and peft."""
    folder = tmp_path_factory.mktemp("library")
    lines = (tiny_corpus / "train" / "more.jsonl").read_text().splitlines()[:40]
    (folder / "docs.jsonl").write_text("\n".join(lines) + "\n")
    for name, path in (("tok", tiny_tokenizer), ("train", tiny_store), ("heldout", tiny_heldout)):
        shutil.copytree(path, folder / name)
    (folder / "run.yaml").write_text(
        f"run: {{name: run, directory: {folder}/runs}}\nmodel: {{preset: llama-tiny}}\n"
        f"tokenizer: {folder}/tok\ndata: {{train: {folder}/train, validation: {folder}/heldout, sequence_length: 64}}\n"
        "optimizer: {type: adamw, lr: 3e-3}\nschedule: {type: constant}\n"
        "training: {steps: 4, batch_tokens: 512, micro_batch_size: 4, dtype: float32}\nlog: {trackers: []}\n"
    )
    assert main(["train", str(folder / "run.yaml")]) == 0
    assert main(["export", str(folder / "runs" / "run"), str(folder / "hf")]) == 0
    (folder / "peft").mkdir()
    up_proj = weft.load_model(folder / "hf").layers[0].mlp.up_proj.weight
    change = weft.LowRank(torch.ones(2, up_proj.shape[1]), torch.ones(len(up_proj), 2), 0.01)
    write_peft(folder / "peft", architecture(folder / "hf"), {"layers.0.mlp.up_proj": change})
    return folder


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


def test_names_are_listed_and_imported_when_they_are_touched():
    program = (
        "import sys, weft; assert dir(weft) == sorted([*weft.__all__, '__version__']); "
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    program = (
        "import weft; weft.Trainer; "
        "assert all(callable(getattr(weft, name)) for name in weft.__all__); weft.generate([], 1)"
    )
    done = forked.run(program=program)
    # A package of this name would have hidden the function once Trainer had imported it.
    assert done.stderr.splitlines()[-1].startswith("TypeError: ")


def test_one_file_is_packed_by_its_path_alone(here):
    assert weft.pack("docs.jsonl", out="one", tokenizer="tok").info.documents == 40


def test_a_dtype_that_is_none_is_one_line(here):
    with pytest.raises(weft.UserError, match="flaot"):
        weft.load_model("runs/run", dtype="flaot")


@pytest.mark.parametrize("name", weft.__all__)
def test_the_examples_in_docstrings_run(here, name):
    for folder in ("store", "exported", "imported", "merged", "averaged"):
        shutil.rmtree(here / folder, ignore_errors=True)
    found = getattr(weft, name)
    assert inspect.getdoc(found)
    finder = doctest.DocTestFinder(recurse=True)
    tests = finder.find(found, name, globs={"weft": weft, "torch": torch, "math": math})
    assert any(test.examples for test in tests), f"no example in weft.{name}"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


def test_text_for_text_and_ids_for_ids(here, capsys):
    run = here / "runs" / "run"
    assert main(["generate", str(run), "Kalo mi", "Ren ", "--max-new-tokens", "6", "--temperature", "0"]) == 0
    shown = [line.partition("] ")[2] for line in capsys.readouterr().out.strip("\n").split("\n\n")]
    model, tokenizer = weft.load_model(run), Tokenizer.load(run / "tokenizer")
    texts = weft.generate(run, ["Kalo mi", "Ren "], max_new_tokens=6)
    assert ["Kalo mi" + texts[0], "Ren " + texts[1]] == [text.strip("\n") for text in shown]
    assert weft.generate(model, "Kalo mi", max_new_tokens=6) == texts[0]
    ids = tokenizer.encode("Kalo mi")
    assert weft.generate(model, "Kalo mi", max_new_tokens=6, lookup=3) == texts[0]
    assert weft.generate(model, "Kalo mi", max_new_tokens=6, draft=run) == texts[0]
    new = weft.generate(model, ids, max_new_tokens=6)
    assert tokenizer.decode(ids + new) == "Kalo mi" + texts[0]
    assert weft.generate(model, [ids], max_new_tokens=6) == [new]
    assert weft.generate(model, []) == []
    many = weft.generate(model, ["Ka"] * 18, max_new_tokens=3, temperature=1.0)
    assert len(many) == 18
    assert len(set(many)) > 1


def test_a_model_given_by_its_path_is_kept_until_another_is_loaded(here, tmp_path, monkeypatch):
    from weft.generation import text

    loaded, load = [], text.load_model

    def counting(path, *args, **kwargs):
        model = load(path, *args, **kwargs)
        loaded.append(weakref.ref(model))
        return model

    def generate(path, **options):
        return weft.generate(path, "Kalo mi", max_new_tokens=6, **options)

    def alive():
        gc.collect()
        return [model() is not None for model in loaded]

    weft.free_models()
    monkeypatch.setattr(text, "load_model", counting)
    copy = shutil.copytree(here / "hf", tmp_path / "copy")
    expected = generate("runs/run")
    assert generate(here / "runs" / "run") == generate("runs/run", draft="runs/run", lookup=0) == expected
    assert alive() == [True]
    assert generate("hf") == generate("hf", draft="runs/run") == expected
    assert alive() == [False, True, True]
    assert generate("hf") == expected
    generate("hf", quantize="int8")
    assert alive() == [False, False, False, True]
    assert generate(copy) == generate(copy) == expected
    weights = load_file(copy / "model.safetensors")
    save_file(
        {name: -weight if "head" in name else weight for name, weight in weights.items()},
        copy / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert generate(copy) != expected
    assert alive() == [False] * 5 + [True]
    weft.free_models()
    assert alive() == [False] * 6
    tokenizer = text.tokenizer_of(copy)
    assert text.tokenizer_of(copy) is tokenizer
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + "\n")
    assert text.tokenizer_of(copy).digest != tokenizer.digest


def test_a_text_ends_where_its_tokens_say_so(here):
    model = weft.load_model(here / "runs" / "run")
    tokenizer = Tokenizer.load(here / "tok")
    with torch.no_grad():  # the end-of-document token is always the likeliest
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eod_id] = model(torch.tensor([[5]]))[:, -1:].new_ones(())
        model.norm.weight.fill_(1.0)
    for prompt, nothing in (([5, 6], []), ("Kalo", "")):
        assert weft.generate(model, prompt, max_new_tokens=4) in (nothing, weft.generate(model, prompt, 4))
        assert len(weft.generate(model, [5, 6], max_new_tokens=4, ignore_eos=True)) == 4


def test_mistakes_of_generate(here):
    from weft.config.model import ModelSection
    from weft.models.build import build_model

    bare = build_model(ModelSection(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16))
    for model, prompts, settings, what in (
        (bare, "text", {}, "texts need a tokenizer"),
        (bare, [], {"temperature": math.inf}, "temperature is inf"),
        (bare, [16], {}, "the model has ids 0 to 15"),
        (bare, [[]], {}, "a prompt has no tokens"),
        ("nowhere", "text", {}, "nowhere: "),
    ):
        with pytest.raises(UserError, match=what):
            weft.generate(model, prompts, **settings)


def test_evaluate_gives_what_the_verb_prints(here, capsys):
    import json

    words = ["evaluate", "runs/run", "--max-tokens", "500", "--json", "scores.json"]
    assert main(words) == 0
    found = weft.evaluate("runs/run", max_tokens=500)
    assert found.as_dict() == json.loads((here / "scores.json").read_text())
    assert f"{found.loss:.4f}" in capsys.readouterr().out
    model = weft.load_model("runs/run")
    both = weft.evaluate(model, store=["heldout", "train"], max_tokens=500, sequence_length=32)
    assert [one.tokens for one in both.stores] == [500, 500]
    assert both.loss == pytest.approx(sum(one.loss for one in both.stores) / 2)
    with pytest.raises(UserError, match="limit has an effect only with tasks"):
        weft.evaluate(model, store="heldout", limit=3)
    with pytest.raises(UserError, match="dtype has an effect only with the path of a model"):
        weft.evaluate(model, store="heldout", dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="'max_token'"):
        weft.evaluate(model, store="heldout", max_token=3)
