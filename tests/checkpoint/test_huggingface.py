"""Models in and out of Hugging Face's files, against transformers itself."""

import json
import re
import shutil

import pytest
import torch
import transformers
from hf_reference import apply
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import weft
from weft.checkpoint.huggingface.folder import open_folder
from weft.checkpoint.huggingface.slices import Source, read_slice
from weft.cli.main import main
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.models.huggingface_weights import Transform

LLAMA = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "max_position_embeddings": 128,
}  # fmt: skip
SMALL = "40KB"  # makes several files of these models


def theirs(kind="llama", dtype=torch.float32, **more):
    """A model of transformers' with random weights, none of them where initialization puts it."""
    torch.manual_seed(5)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=4, n_positions=128, **more))
    else:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model.to(dtype).eval()


def folder(path, model, tokenizer=None, shards="5GB"):
    model.save_pretrained(path, max_shard_size=shards)
    for file in tokenizer.iterdir() if tokenizer else []:
        shutil.copy(file, path)
    return path


def weft_command(*words):
    return main([str(word) for word in words])


def tensors(path):
    """name -> (dtype, shape, bytes) of all safetensors files of a folder."""
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                found[name] = (
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
                )
    return found


def logits(model, tokens):
    with torch.no_grad():
        found = model(tokens)
    return (found if isinstance(found, torch.Tensor) else found.logits).float()


CASES = {
    "llama": ("llama", torch.float32, "5GB", {"attention_bias": True}),
    "llama in shards": ("llama", torch.float32, SMALL, {}),
    "tied in shards": ("llama", torch.float32, SMALL, {"tie_word_embeddings": True}),
    "bfloat16": ("llama", torch.bfloat16, "5GB", {}),
    "gpt2 in shards": ("gpt2", torch.float32, SMALL, {}),
    "gpt2 untied": ("gpt2", torch.float32, "5GB", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_in_and_out_again(tmp_path, tiny_tokenizer, capsys, case):
    kind, dtype, shards, more = CASES[case]
    model = theirs(kind, dtype, **more)
    source = folder(tmp_path / "hf", model, tiny_tokenizer, shards)
    assert (source / "model.safetensors.index.json").exists() == (shards == SMALL)
    assert weft_command("import", source, tmp_path / "ours") == 0
    assert kind in capsys.readouterr().out

    tokens = torch.randint(0, 512, (2, 9))
    expected = logits(model, tokens)
    for path in (source, tmp_path / "ours"):
        loaded = weft.load_model(path)
        assert {p.dtype for p in loaded.parameters()} == {dtype}
        if dtype == torch.float32:
            assert (logits(loaded, tokens) - expected).abs().max() < 1e-5

    assert weft_command("export", tmp_path / "ours", tmp_path / "back", "--to", "hf", "--max-shard-size", SMALL) == 0
    assert tensors(tmp_path / "back") == tensors(source)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert back.dtype == dtype
    assert torch.equal(logits(back, tokens), logits(AutoModelForCausalLM.from_pretrained(source), tokens))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
        assert getattr(back.config, key) == getattr(model.config, key)


LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "num_key_value_heads": 4, "norm_topk_prob": False,
}  # fmt: skip
FAMILIES = {
    "Mistral": {"sliding_window": 7},
    "Qwen2": {},
    "Qwen3": {"head_dim": 10},
    "Olmo2": {"num_key_value_heads": 4},
    "Phi3": {"pad_token_id": None},
    "SmolLM3": {"pad_token_id": None},
    "Granite": {"residual_multiplier": 0.3},
    "Starcoder2": {},
    "Gemma2": {"head_dim": 12, "sliding_window": 7},
    "Gemma3Text": {"head_dim": 12, "sliding_window": 7},
    "GPTNeoX": {},
    "Mpt": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT | {"n_group": 2, "topk_group": 1},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_and_out_again(tmp_path, family):
    more = LLAMA | {"num_hidden_layers": 3, "bos_token_id": None, "eos_token_id": 3} | FAMILIES[family]
    torch.manual_seed(2)
    if family == "Mpt":
        more = {"vocab_size": 512, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, "eos_token_id": 3}
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**more))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn_like(tensor) * 0.15)
    source = folder(tmp_path / "hf", model.eval())
    assert weft_command("import", source, tmp_path / "ours") == 0
    assert weft_command("export", tmp_path / "ours", tmp_path / "back") == 0
    assert tensors(tmp_path / "back") == tensors(source)
    tokens = torch.randint(0, 512, (2, 20))
    expected = logits(model, tokens)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "back"), tokens), expected)
    assert (logits(weft.load_model(source), tokens) - expected).abs().max() < 1e-5


def test_a_run_to_transformers(tmp_path, run_yaml, tiny_tokenizer):
    yaml = run_yaml(
        training={"steps": 2},
        schedule={"warmup_steps": 1},
        model={"preset": "llama-tiny", "tie_word_embeddings": False},
    )
    assert weft_command("train", yaml) == 0
    run, out = tmp_path / "runs" / "demo", tmp_path / "out"
    assert weft_command("export", run, out, "--to", "hf") == 0
    tokens = torch.randint(0, 512, (2, 20))
    expected = logits(weft.load_model(run), tokens)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (logits(model, tokens) - expected).abs().max() < 1e-5
    assert torch.equal(logits(weft.load_model(out), tokens), expected)

    text = "Kalo mi ren, statu.\n\n def Größe(x): 12345"
    ours = Tokenizer.load(tiny_tokenizer)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded.encode(text, add_special_tokens=False) == ours.encode(text)
    assert loaded.eos_token_id == ours.eod_id == model.config.eos_token_id == model.generation_config.eos_token_id


def test_export_in_another_dtype(tmp_path):
    source = folder(tmp_path / "hf", theirs())
    assert weft_command("import", source, tmp_path / "ours") == 0
    assert weft_command("export", tmp_path / "ours", tmp_path / "out", "--dtype", "bfloat16") == 0
    original = theirs().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.bfloat16
    assert all(torch.equal(value, original[name].bfloat16()) for name, value in exported.state_dict().items())


def test_import_in_another_dtype(tmp_path):
    source = folder(tmp_path / "hf", theirs())
    assert weft_command("import", source, tmp_path / "ours", "--dtype", "bfloat16") == 0
    converted, original = weft.load_model(tmp_path / "ours"), weft.load_model(source)
    for name, value in original.state_dict().items():
        assert torch.equal(converted.state_dict()[name], value.bfloat16())


def test_the_bias_that_balances_experts_stays_precise(tmp_path):
    config = transformers.DeepseekV3Config(**LLAMA | LATENT | {"n_group": 2, "topk_group": 1})
    model = AutoModelForCausalLM.from_config(config)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    with torch.no_grad():
        bias.copy_(0.5 + 0.001 * torch.arange(4))
    source = folder(tmp_path / "hf", model)
    assert weft_command("import", source, tmp_path / "ours", "--dtype", "bfloat16") == 0
    assert weft_command("export", tmp_path / "ours", tmp_path / "back", "--dtype", "bfloat16") == 0
    for path in (tmp_path / "ours", tmp_path / "back"):
        loaded = weft.load_model(path, dtype=torch.bfloat16)
        assert torch.equal(loaded.layers[1].mlp.router.correction_bias, bias)
        assert loaded.layers[1].mlp.router.weight.dtype == torch.bfloat16
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(back.model.layers[1].mlp.gate.e_score_correction_bias, bias)


def losses(tmp_path, name):
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.xdist_group("ranks")
def test_training_starts_from_the_folder_each_rank_reading_its_part(ranks, tmp_path, run_yaml, tiny_tokenizer):
    source = folder(tmp_path / "hf", theirs("gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0), tiny_tokenizer)
    assert weft_command("import", source, tmp_path / "ours") == 0
    common = {
        "training": {"steps": 2},
        "schedule": {"warmup_steps": 1},
        "tokenizer": str(source),
        "checkpoint": {"every": 2},
    }
    for name, start in (("direct", source), ("imported", tmp_path / "ours"), ("both", source)):
        yaml = run_yaml(run={"name": name}, **common)
        yaml.write_text(re.sub("(?m)^model: .*$", f"model: {{from: {start}}}", yaml.read_text()))
        if name == "both":
            ranks.run(yaml, 2)
        else:
            assert weft_command("train", yaml) == 0
    assert losses(tmp_path, "direct") == losses(tmp_path, "imported")
    assert losses(tmp_path, "both") == pytest.approx(losses(tmp_path, "direct"), abs=2e-6)

    # What two ranks saved goes straight into one file.
    assert weft_command("export", tmp_path / "runs" / "both", tmp_path / "out") == 0
    loaded = weft.load_model(tmp_path / "runs" / "both").state_dict()
    assert all(
        torch.equal(value, loaded[name]) for name, value in weft.load_model(tmp_path / "out").state_dict().items()
    )


@pytest.mark.parametrize(
    ("transform", "stored"),
    [
        (None, (12, 5)),
        (None, (12,)),
        (None, (4, 6, 5)),
        (Transform(transposed=True), (5, 12)),
        (Transform(sizes=(8, 4, 4), part=1), (16, 5)),
        (Transform(sizes=(8, 4, 4), part=2), (16,)),
        (Transform(transposed=True, sizes=(8, 4, 4), part=0), (5, 16)),
        (Transform(sizes=(3, 3, 3), part=1, groups=4), (36, 5)),
        (Transform(sizes=(3, 3, 3), part=2, groups=4), (36,)),
        (Transform(stacked=True, transposed=True), (3, 5, 12)),
        (Transform(stacked=True, transposed=True, sizes=(1, 1), part=1, groups=6), (3, 5, 12)),
        (Transform(stacked=True, sizes=(1, 1), part=0, groups=6), (3, 12)),
    ],
)
def test_any_rectangle_is_read_as_from_the_whole(tmp_path, transform, stored):
    whole = torch.randn(stored)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    ours = apply(transform, whole)
    source = Source("w", transform, tuple(ours.shape))
    for start in range(ours.shape[0]):
        for length in range(ours.shape[0] - start + 1):
            begin, size = (start, *[1] * (ours.dim() - 1)), (length, *[n - 1 for n in ours.shape[1:]])
            index = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
            assert torch.equal(read_slice(tmp_path / "model.safetensors", source, begin, size), ours[index])


def test_older_names_masks_and_a_saved_tied_head(tmp_path):
    """As in the first GPT-2 files: no prefix, masks among the weights, and the head once more."""
    model = theirs("gpt2")
    source = folder(tmp_path / "hf", model)
    file = source / "model.safetensors"
    state = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": state["wte.weight"].clone()}
    save_file(state, file)
    tokens = torch.randint(0, 512, (1, 9))
    assert (logits(weft.load_model(source), tokens) - logits(model, tokens)).abs().max() < 1e-5
    save_file(state | {"lm_head.weight": state["wte.weight"] + 1}, file)
    with pytest.raises(weft.UserError, match=r"lm_head.weight differs from wte.weight"):
        open_folder(source)


@pytest.mark.parametrize("imported", [False, True])
def test_generate(tmp_path, tiny_tokenizer, capsys, imported):
    path = folder(tmp_path / "hf", theirs(), tiny_tokenizer)
    if imported:
        assert weft_command("import", path, tmp_path / "ours") == 0
        path = tmp_path / "ours"
    capsys.readouterr()
    assert weft_command("generate", path, "Kalo mi", "--max-new-tokens", "4", "--temperature", "0") == 0
    assert capsys.readouterr().out.startswith("Kalo mi")
