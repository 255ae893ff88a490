"""Multi-token prediction layers in and out of DeepSeek-V3's files, beside transformers' class of the main model."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import weft
from weft.cli.main import main

SHAPE = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 56, "max_position_embeddings": 128, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 20,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LAYER = "model.layers.2."


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    """A DeepSeek-V3 as published: with the tensors of one prediction layer, which transformers ignores."""
    path = tmp_path_factory.mktemp("mtp") / "hf"
    torch.manual_seed(2)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(path)
    state = load_file(path / "model.safetensors")
    for name in [name for name in state if name.startswith("model.layers.1.")]:
        state[name.replace("model.layers.1.", LAYER)] = torch.randn_like(state[name]) * 0.15
    for name in ("enorm", "hnorm", "shared_head.norm"):
        state[f"{LAYER}{name}.weight"] = 1 + 0.1 * torch.randn(32)
    state[f"{LAYER}eh_proj.weight"] = 0.15 * torch.randn(32, 64)
    state[f"{LAYER}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[f"{LAYER}shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    for file in tiny_tokenizer.iterdir():
        shutil.copy(file, path)
    return path


def weft_command(*words):
    return main([str(word) for word in words])


def test_all_tensors_come_back(folder, tmp_path, capsys):
    assert weft_command("import", folder, tmp_path / "all", "--mtp") == 0
    assert weft_command("import", folder, tmp_path / "main") == 0
    assert "weft import --mtp, to read them" in capsys.readouterr().err.replace("use ", "")
    assert weft_command("export", tmp_path / "all", tmp_path / "hf") == 0
    original, written = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert original.keys() == written.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in original.items())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    tokens = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(tokens).logits
    for path in (tmp_path / "all", tmp_path / "main"):  # of which both are without the layers, to generate
        assert (weft.load_model(path)(tokens) - expected).abs().max() < 2e-5


def test_a_run_trains_the_layers_of_a_folder(folder, tmp_path, run_yaml):
    """Without a learning rate to speak of, all tensors come back as they were."""
    optimizer, schedule = {"lr": 1e-30, "weight_decay": 0.0}, {"type": "constant", "warmup_steps": 0}
    model = {"from": str(folder), "preset": None, "num_nextn_predict_layers": 1}
    training = {"steps": 1, "batch_tokens": 256}
    path = run_yaml(model=model, training=training, optimizer=optimizer, schedule=schedule)
    assert weft_command("train", path) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert any("mtp_loss" in line for line in lines)
    assert weft_command("export", tmp_path / "runs" / "demo", tmp_path / "hf") == 0
    original, written = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert original.keys() == written.keys()
    changed = [name for name, tensor in original.items() if not torch.equal(written[name], tensor)]
    assert all("correction_bias" in name for name in changed)  # moved by the balance of the experts


def test_a_copy_of_the_embedding_that_differs_is_refused(folder, tmp_path, capsys):
    path = shutil.copytree(folder, tmp_path / "hf")
    state = load_file(path / "model.safetensors")
    state[f"{LAYER}embed_tokens.weight"][3, 3] += 1
    save_file(state, path / "model.safetensors", {"format": "pt"})
    assert weft_command("import", path, tmp_path / "out", "--mtp") == 2
    assert "differs from model.embed_tokens.weight" in capsys.readouterr().err
    assert weft_command("import", path, tmp_path / "out") == 0
    for name in ("embed_tokens", "shared_head.head"):  # some files leave out the copies
        del state[f"{LAYER}{name}.weight"]
    save_file(state, path / "model.safetensors", {"format": "pt"})
    assert weft_command("import", path, tmp_path / "without", "--mtp") == 0
    del state[f"{LAYER}eh_proj.weight"]
    save_file(state, path / "model.safetensors", {"format": "pt"})
    assert weft_command("import", path, tmp_path / "broken", "--mtp") == 2
    assert f"{LAYER}eh_proj.weight is missing" in capsys.readouterr().err
