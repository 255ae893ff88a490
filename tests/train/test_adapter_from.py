"""`adapter.from`: runs that start with an adapter in PEFT's files or of another run."""

import json
import sys
import warnings
from pathlib import Path

import peft
import pytest
import transformers
from running import QUIET, losses, train

import weft
from weft.cli.main import main

sys.path += [str(Path(__file__).parents[1] / name) for name in ("models", "checkpoint")]
from test_peft_files import EXPERTS, logits, randomized
from test_peft_files import base_model as any_base_model

# Family, LoraConfig, and the keys that the run gets.
CASES = {
    "patterns": (
        "Llama",
        {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 7}, "alpha_pattern": {"q_proj": 3}},
        {"r": 7, "alpha": 6.0, "targets": ["attention.q_proj", "mlp.up_proj"], "rslora": False, "dora": False},
    ),
    "some layers": (
        "Llama",
        {"target_modules": r".*\.[02]\..*(k|down)_proj", "use_dora": True, "use_rslora": True},
        {"r": 4, "rslora": True, "dora": True, "targets": [
            f"layers.{n}.{name}" for n in (0, 2) for name in ("attention.k_proj", "mlp.down_proj")
        ]},
    ),
    "fused": ("Phi3", {"target_modules": "all-linear"}, {"r": 4}),
    "experts": ("GptOss", {"target_modules": ["o_proj"], **EXPERTS}, {"r": 4}),
}  # fmt: skip


def base_model(path, family):
    return any_base_model(path, family, {"vocab_size": 512})


def peft_folder(path, base, **options):
    """An adapter of PEFT with random values, and PEFT's logits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
        randomized(model, 0.3).save_pretrained(path)
    return logits(model)


@pytest.fixture
def write(run_yaml, tmp_path):
    """Writes a run with an adapter that hardly learns."""

    def write(name, adapter, steps=1, lr=1e-30, base=tmp_path / "base", model=None):
        file = run_yaml(
            f"{name}.yaml", run={"name": name}, model=None, 
            data={"validation": None, "sequence_length": 16}, log=QUIET,
            training={"steps": steps, "batch_tokens": 64, "micro_batch_size": 2},
            optimizer={"type": "adamw", "lr": lr, "weight_decay": 0.0},
            schedule={"type": "constant", "warmup_steps": 0}, checkpoint={"every": 1, "keep_last": 9},
        )  # fmt: skip
        with file.open("a") as text:
            text.write(f"\nmodel: {json.dumps(model or {'from': str(base)})}\nadapter: {json.dumps(adapter)}\n")
        return file

    return write


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in ("fused", "patterns") else ()) for case in CASES]
)
def test_a_run_starts_as_the_adapter_of_peft(write, tmp_path, capsys, case):
    family, options, keys = CASES[case]
    expected = peft_folder(tmp_path / "peft", base_model(tmp_path / "base", family), **options)
    same = {"r": 4, "alpha": 6, "targets": "all-linear", "dora": False} if case == "fused" else {}
    file = write("run", {"from": str(tmp_path / "peft")} | same)
    config = weft.RunConfig.load(file).adapter
    assert {key: getattr(config, key) for key in keys} == keys
    assert train(file) == 0, capsys.readouterr().err
    model = weft.load_model(tmp_path / "runs" / "run")
    assert (logits(model) - expected).abs().max() < 2e-5
    if case == "patterns":  # rows of A that the adapter does not have must be able to learn
        a, b = (model.get_parameter(f"layers.0.attention.q_proj.lora_{one}") for one in "ab")
        assert a[4:].abs().min() > 0
        assert b[:, 4:].abs().max() < 1e-20
        assert train(file, "training.steps=2") == 0  # resumes


def test_a_run_continues_the_adapter_of_another_run(write, tmp_path, capsys):
    base_model(tmp_path / "base", "Llama")
    first = {"r": 3, "alpha": 6.0, "targets": ["q_proj", "down_proj"], "init": "pissa"}
    assert train(write("first", first, steps=3, lr=0.01)) == 0
    second = write("second", {"from": str(tmp_path / "runs" / "first")})
    assert train(second) == 0
    old, new = (logits(weft.load_model(tmp_path / "runs" / name)) for name in ("first", "second"))
    assert (old - new).abs().max() < 1e-6
    assert (old - logits(weft.load_model(tmp_path / "base"))).abs().max() > 1e-3
    assert main(["export", str(tmp_path / "runs" / "first"), str(tmp_path / "peft"), "--to", "peft"]) == 0
    third = write("third", {"from": str(tmp_path / "peft")})
    assert train(third) == 0
    assert (logits(weft.load_model(tmp_path / "runs" / "third")) - old).abs().max() < 1e-5
    assert losses(tmp_path / "runs" / "third")[0][1] == pytest.approx(losses(tmp_path / "runs" / "second")[0][1], 1e-5)

    base = base_model(tmp_path / "base", "Llama")
    base.model.norm.weight.data.add_(0.01)
    base.save_pretrained(tmp_path / "base")
    for name, source in (("fourth", tmp_path / "runs" / "first"), ("fifth", tmp_path / "peft")):
        capsys.readouterr()
        assert train(write(name, {"from": str(source)})) == 2
        assert "not the weights that the adapter was trained on" in capsys.readouterr().err


def test_mistakes_are_one_line(write, tmp_path, capsys):
    base = base_model(tmp_path / "base", "Llama")
    peft_folder(tmp_path / "peft", base, target_modules=["q_proj"])
    peft_folder(tmp_path / "head", base_model(tmp_path / "base", "Llama"), target_modules=["q_proj", "lm_head"])
    peft_folder(
        tmp_path / "full", base_model(tmp_path / "base", "Llama"), target_modules=["q_proj"], modules_to_save=["norm"]
    )
    base_model(tmp_path / "phi", "Phi3")
    for name, adapter, other, expected in (
        ("a", {"from": str(tmp_path / "peft"), "r": 8}, {}, "adapter.r: 8 differs from the 4 of the adapter"),
        ("t", {"from": str(tmp_path / "peft"), "targets": "auto"}, {}, "adapter.targets: auto differs from the ['att"),
        ("b", {"from": str(tmp_path / "absent")}, {}, "adapter.from"),
        ("c", {"from": str(tmp_path / "base")}, {}, "neither a run with an adapter nor a folder of PEFT"),
        ("d", {"from": str(tmp_path / "head")}, {}, "lm_head cannot be trained; merge the adapter"),
        ("e", {"from": str(tmp_path / "full")}, {}, "replaces the full weight"),
        ("f", {"from": str(tmp_path / "peft")}, {"base": tmp_path / "phi"}, "match no layer of this model"),
    ):
        capsys.readouterr()
        assert train(write(name, adapter, **other)) == 2
        err = capsys.readouterr().err
        assert expected in err
        assert "Traceback" not in err


def test_a_layer_outside_the_blocks_of_a_transformers_model_is_not_left_out(write, tmp_path, capsys):
    config = transformers.OPTConfig(
        vocab_size=512, hidden_size=16, word_embed_proj_dim=8, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    peft_folder(tmp_path / "peft", base, target_modules="all-linear")
    file = tmp_path / "peft" / "adapter_config.json"  # in which PEFT has replaced all-linear by a list
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": "all-linear"}))
    assert (
        train(write("run", {"from": str(tmp_path / "peft")}, model={"type": "hf", "path": str(tmp_path / "base")})) == 2
    )
    line = capsys.readouterr().err
    assert f"{tmp_path / 'peft'}: adapter.from: the adapter of" in line
    assert "decoder.project_in cannot be trained; merge the adapter (weft merge)" in line
