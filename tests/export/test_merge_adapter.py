"""Trained adapters for PEFT, and merged into their base model, against PEFT and the unmerged model."""

import copy
import json
import shutil
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft
from weft.cli.main import main

sys.path += [str(Path(__file__).parents[1] / name) for name in ("models", "checkpoint", "train")]
from running import QUIET, train
from test_families import ROWS
from test_huggingface import LLAMA, tensors

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
# Family, changed keys of its config.json, and the section `adapter`.
CASES = {
    "llama": ("Llama", {"tie_word_embeddings": True}, {"targets": "auto"}),
    "pissa": ("Llama", {}, {"targets": ["q_proj", "down_proj"], "init": "pissa"}),
    "dora": ("Phi3", {}, {"dora": True, "rslora": True, "dropout": 0.1}),
    "experts": ("Mixtral", {}, {"targets": "all-linear"}),
    "hf": ("Qwen2", {}, {"targets": ["q_proj", "up_proj"]}),
    "nf4": ("Llama", {"intermediate_size": 64}, {"targets": "auto", "quantize": "nf4"}),
}


def base_model(path, family, changes, tokenizer, dtype=torch.float32):
    """A random model in a folder, with a chat template and two end tokens."""
    torch.manual_seed(3)
    row = LLAMA if family == "Llama" else next(iter(ROWS[family].values()))
    config = getattr(transformers, f"{family}Config")(**row | {"vocab_size": 512} | changes)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.1)
    model.generation_config.eos_token_id = [1, 2]
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    model.save_pretrained(path)
    for file in tokenizer.iterdir():
        shutil.copy(file, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def tuned(run_yaml, tmp_path, tiny_tokenizer, capsys):
    """Trains an adapter of a case on a base model. Returns the paths of the run and of the base model."""

    def make(case, **more):
        family, changes, adapter = CASES[case]
        base = base_model(tmp_path / "base", family, changes, tiny_tokenizer, **more)
        model = {"type": "hf", "path": str(base)} if case == "hf" else {"from": str(base)}
        file = run_yaml(
            model=None, tokenizer=str(base), data={"validation": None, "sequence_length": 32}, log=QUIET,
            training={"steps": 2, "batch_tokens": 256, "micro_batch_size": 4}, checkpoint={"every": 2},
            optimizer={"type": "adamw", "lr": 2e-2}, schedule={"type": "constant", "warmup_steps": 0},
        )  # fmt: skip
        with file.open("a") as text:
            text.write(f"\nmodel: {json.dumps(model)}\nadapter: {json.dumps({'r': 3, 'alpha': 6.0} | adapter)}\n")
        assert train(file) == 0, capsys.readouterr().err
        capsys.readouterr()
        return tmp_path / "runs" / "demo", base

    return make


def logits(model):
    with torch.no_grad():
        found = model(torch.randint(0, 500, (2, 13), generator=torch.Generator().manual_seed(4)))
    return (found if isinstance(found, torch.Tensor) else found.logits).float()


def load_in_peft(base, adapter):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected|size mismatch).*")
        return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()


def weft_command(capsys, *words):
    capsys.readouterr()
    return main([str(word) for word in words]), *capsys.readouterr()


def merged_in_a_graph(run, tmp_path, expected):
    assert main(["export", str(run), str(tmp_path / "graph"), "--to", "torch"]) == 0
    call = torch.export.load(tmp_path / "graph/model.pt2").module()
    layout = json.loads((tmp_path / "graph/graph.json").read_text())["inputs"][2:]
    past = [torch.zeros(2, entry["shape"][1], 0, entry["shape"][3]) for entry in layout]
    graph = logits(lambda ids: call(ids, torch.arange(ids.shape[1]).repeat(2, 1), *past)[0])
    assert (graph - expected).abs().max() < 1e-4


@pytest.mark.long
def test_adapters_of_experts_are_merged_when_a_graph_is_captured(tuned, tmp_path):
    run, _ = tuned("experts")
    merged_in_a_graph(run, tmp_path, logits(weft.load_model(run)))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.long if case in ("llama", "hf") else ()) for case in CASES if case != "nf4"],
)
def test_a_trained_adapter_for_peft_and_merged(tuned, tmp_path, capsys, case):
    run, base = tuned(case)
    expected, before = logits(weft.load_model(run)), logits(AutoModelForCausalLM.from_pretrained(base))
    assert (expected - before).abs().max() > 1e-3
    code, out, err = weft_command(capsys, "export", run, tmp_path / "peft", "--to", "peft")
    assert (code, err) == (0, "")
    assert "LoRA adapter of" in out
    assert (logits(load_in_peft(base, tmp_path / "peft")) - expected).abs().max() < 1e-4
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["r"] == (6 if case == "pissa" else 3)

    if case == "pissa":
        merged_in_a_graph(run, tmp_path, expected)
    if case in ("llama", "pissa", "dora"):
        texts = [weft.generate(run, [5, 6, 7], 6, ignore_eos=True)]
        texts += [weft.generate(base, [5, 6, 7], 6, ignore_eos=True, adapter=one) for one in (run, tmp_path / "peft")]
        assert texts[0] == texts[1] == texts[2]
        changed, twice = (
            AutoModelForCausalLM.from_pretrained(base),
            r"has an adapter already.* use (the|its) base model",
        )
        changed.model.norm.weight.data.add_(0.01)
        changed.save_pretrained(tmp_path / "other")
        loaded, other = weft.load_model(run), weft.load_model(tmp_path / "other")
        for one in (run, tmp_path / "peft"):
            with pytest.raises(weft.UserError, match=twice):
                weft.generate(run, [5, 6, 7], 6, adapter=one)
            with pytest.raises(weft.UserError, match=twice):
                weft.Engine(loaded).add_adapter("tuned", one)
            with pytest.raises(weft.UserError, match="not the weights that the adapter was trained on"):
                weft.Engine(other).add_adapter("tuned", one)
        with pytest.raises(weft.UserError, match=twice):  # a model without a path
            weft.Engine(copy.deepcopy(loaded)).add_adapter("tuned", tmp_path / "peft")

    sources = [(run, []), (base, ["--adapter", tmp_path / "peft"])]
    for source, options in sources[: 2 if case in ("pissa", "hf") else 1]:
        target = tmp_path / f"merged of {source.name}"
        code, out, err = weft_command(capsys, "merge", source, target, *options)
        assert code == 0
        assert "rounding" not in out + err
        merged = AutoModelForCausalLM.from_pretrained(target)
        assert (logits(merged) - expected).abs().max() < 1e-4
        assert merged.config.tie_word_embeddings == CASES[case][1].get("tie_word_embeddings", False)
        if case != "hf":
            assert (logits(weft.load_model(target)) - expected).abs().max() < 1e-4
        # A merge that changes the end tokens gives a model that never stops (unslothai/unsloth#5386).
        for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
            ours, theirs = ((folder / name).read_text() for folder in (target, base))
            assert ours == theirs if name != "generation_config.json" else json.loads(ours) == json.loads(theirs)
        assert AutoTokenizer.from_pretrained(target).chat_template == TEMPLATE
        same = {name for name, value in tensors(target).items() if value == tensors(base)[name]}
        assert tensors(target).keys() == tensors(base).keys() > same
        assert any("embed" in name or "wte" in name for name in same)  # an untouched or tied embedding


def test_a_merge_in_16_bits_says_what_it_loses(tuned, tmp_path, capsys):
    run, base = tuned("llama", dtype=torch.bfloat16)
    code, out, err = weft_command(capsys, "merge", run, tmp_path / "merged")
    assert code == 0
    lost = float(out.partition("rounding to bfloat16 loses ")[2].partition("%")[0]) / 100
    own = weft.load_model(tmp_path / "merged").state_dict()
    changed = weft.load_model(run, dtype=torch.float32).state_dict()
    old = weft.load_model(base).state_dict()
    error = change = 0.0
    for name, value in own.items():
        assert value.dtype == torch.bfloat16
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_a" in changed:
            exact = 2.0 * changed[f"{stem}.lora_b"].float() @ changed[f"{stem}.lora_a"].float()
            change += exact.square().sum().item()
            error += (value.float() - old[name].float() - exact).square().sum().item()
    assert lost == pytest.approx((error / change) ** 0.5, abs=2e-4)
    assert 0 < lost < 0.1
    assert "loses" not in err
    made = weft.merge_adapter(run, tmp_path / "wide", dtype="float32")
    assert made.rounding_loss == 0.0
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    assert (logits(wide) - logits(weft.load_model(run, dtype=torch.float32))).abs().max() < 1e-4

    weak = peft.LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), weak)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(1e-4)
    model.save_pretrained(tmp_path / "weak")
    code, out, err = weft_command(capsys, "merge", base, tmp_path / "weaker", "--adapter", tmp_path / "weak")
    assert code == 0
    (line,) = [one for one in err.splitlines() if "loses" in one]
    assert "--dtype float32" in line


def test_an_adapter_of_a_quantized_base_belongs_to_the_dequantized_weights(tuned, tmp_path, capsys):
    """The merge with the original weights would be another model (unslothai/unsloth-zoo#810)."""
    run, base = tuned("nf4")
    expected = logits(weft.load_model(run))
    code, _, err = weft_command(capsys, "merge", run, tmp_path / "merged")
    assert code == 2
    assert "trained on weights in nf4" in err
    assert "--dequantize" in err
    code, _, err = weft_command(capsys, "export", run, tmp_path / "graph", "--to", "torch")
    assert code == 2
    assert "weft merge --dequantize" in err
    code, _, _ = weft_command(capsys, "merge", run, tmp_path / "merged", "--dequantize")
    assert code == 0
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - expected).abs().max() < 1e-5
    weft.export_model(run, tmp_path / "peft", to="peft")  # the adapter alone, to be added to quantized weights
    original = logits(load_in_peft(base, tmp_path / "peft"))
    assert (original - expected).abs().max() > 1e-4


def test_full_weights_and_a_checkpoint(tmp_path, tiny_tokenizer, capsys):
    base = base_model(tmp_path / "base", "Llama", {}, tiny_tokenizer)
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape) * 0.3)
    model.eval().save_pretrained(tmp_path / "peft")
    assert main(["import", str(base), str(tmp_path / "imported")]) == 0
    expected = logits(model)
    for number, source in enumerate((base, tmp_path / "imported")):
        for to in ("hf", "checkpoint"):
            target = tmp_path / f"{to}{number}"
            weft.merge_adapter(source, target, tmp_path / "peft", to=to)
            assert (logits(weft.load_model(target)) - expected).abs().max() < 1e-4
            assert (target / "model.json").exists() == (to == "checkpoint")
    assert main(["export", str(tmp_path / "checkpoint1"), str(tmp_path / "again")]) == 0
    assert tensors(tmp_path / "again") == tensors(tmp_path / "hf0")
    generation = [json.loads((tmp_path / one / "generation_config.json").read_text()) for one in ("base", "again")]
    assert generation[0] == generation[1]


def test_what_cannot_be_merged_is_refused(tuned, tmp_path, capsys):
    run, base = tuned("llama")
    assert main(["export", str(run), str(tmp_path / "peft"), "--to", "peft"]) == 0
    mistakes = [
        (["merge", base, "out"], "this model has no adapter"),
        (["merge", run, "out", "--adapter", tmp_path / "peft"], "give its base model"),
        (["export", base, "out", "--to", "peft"], "this model has no adapter"),
        (["export", run, "out", "--to", "hf"], "weft merge"),
        (["merge", run, base], "exists"),
        (["merge", run, "out", "--dtype", "int3"], "use one of float32"),
        (["merge", base, "out", "--adapter", base], "adapter_config.json is missing"),
    ]
    for words, expected in mistakes:
        code, _, err = weft_command(capsys, *words)
        assert code == 2
        assert expected in err
        assert err.count("\n") == 1
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data.add_(1e-3)  # another base model of the same shape
    model.save_pretrained(base)
    commands = [["merge", run, "out"], ["merge", base, "out", "--adapter", tmp_path / "peft"]]
    commands += [["generate", base, "Kalo", "--adapter", one] for one in (run, tmp_path / "peft")]
    for words in commands:
        code, _, err = weft_command(capsys, *words)
        assert code == 2
        assert "not the weights that the adapter was trained on" in err
    assert not Path("out").exists()
