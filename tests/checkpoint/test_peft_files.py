"""PEFT's adapter files in and out, against PEFT itself. All matrices B differ from zero, as after training."""

import json
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import weft
from weft.checkpoint.huggingface.peft_files import read_peft
from weft.checkpoint.huggingface.peft_writer import write_peft
from weft.models.low_rank import LowRank

sys.path.append(str(Path(__file__).parents[1] / "models"))
from test_families import MOE, ROWS

LLAMA = ROWS["Llama"]["as is"]
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
# Family, changed keys of its config.json, and LoraConfig.
CASES = {
    "llama": ("Llama", {}, {"target_modules": "all-linear"}),
    "patterns, some layers": (
        "Llama", {}, {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 7, r"1.self_attn.q_proj": 2},
                      "alpha_pattern": {"q_proj": 3}, "layers_to_transform": [1, 2]},
    ),
    "regular expression": (
        "Llama", {}, {"target_modules": r".*\.[12]\..*(q|v)_proj", "exclude_modules": ["layers.2.self_attn.q_proj"]}
    ),
    "dora, rslora, biases": (
        "Llama", {"attention_bias": True},
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "use_rslora": True},
    ),
    "head": ("Llama", {}, {"target_modules": ["v_proj", "lm_head"]}),
    "full weights": ("Llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "trained biases": ("Llama", {"attention_bias": True}, {"target_modules": ["q_proj"], "bias": "all"}),
    "gpt2": ("GPT2", {}, {"target_modules": "all-linear", "use_dora": True}),
    "gpt-neox": ("GPTNeoX", {"tie_word_embeddings": False}, {"target_modules": ["query_key_value", "lm_head"]}),
    "phi3": ("Phi3", {}, {"target_modules": "all-linear", "use_dora": True}),
    "mpt": ("Mpt", {}, {"target_modules": ["Wqkv", "up_proj"]}),
    "mixtral": ("Mixtral", {}, {"target_modules": "all-linear"}),  # PEFT adapts the router and the experts, too
    "experts": ("Qwen3Moe", {}, {"target_modules": ["q_proj"], "use_rslora": True, **EXPERTS}),
    "one weight of experts": ("Olmoe", {}, {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
    "gpt-oss": ("GptOss", {}, {"target_modules": ["k_proj"], **EXPERTS}),
    "deepseek": ("DeepseekV2", {}, {"target_modules": ["kv_b_proj", "q_a_proj"], **EXPERTS}),
}  # fmt: skip


def randomized(model, scale):
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or scale < 0.2:
            parameter.data.copy_(torch.randn(parameter.shape) * scale)
            if "magnitude" in name:
                parameter.data.abs_().add_(0.5)
    return model.eval()


def base_model(path, family, changes=None):
    """A random model of transformers, saved in a folder."""
    torch.manual_seed(3)
    row = next(iter(ROWS[family].values())) | (changes or {})
    config = getattr(transformers, f"{family}Config")(**row)
    model = randomized(transformers.AutoModelForCausalLM.from_config(config), 0.12)
    model.save_pretrained(path)
    return model


def adapt(tmp_path, case, rank=4):
    """A folder with a base model, a folder with an adapter of PEFT, and PEFT's logits of `tokens()`."""
    family, changes, options = CASES[case]
    base = base_model(tmp_path / "base", family, changes)
    config = peft.LoraConfig(r=rank, lora_alpha=6, task_type="CAUSAL_LM", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = randomized(peft.get_peft_model(base, config), 0.3)
        model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter", logits(model)


def tokens():
    return torch.randint(0, 90, (2, 11), generator=torch.Generator().manual_seed(4))


def logits(model):
    with torch.no_grad():
        found = model(tokens())
    return found if isinstance(found, torch.Tensor) else found.logits


def merged(model, adapter):
    """The model with the changes of an adapter."""
    own = model.state_dict()
    for name, weight in adapter.weights.items():
        own[name].copy_(weight)
    for name, change in adapter.layers.items():
        weight = own[name if name in own else f"{name}.weight"]
        weight.copy_(change.merged(weight))
    return model


def load_in_peft(base, adapter):
    """PEFT's model with the adapter; a warning about keys that do not fit is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected|size mismatch).*")
        return peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter).eval()


@pytest.mark.parametrize("case", CASES)
def test_in_and_out(tmp_path, case):
    base, folder, expected = adapt(tmp_path, case)
    model = weft.load_model(base)
    assert (logits(model) - expected).abs().max() > 1e-3
    adapter = read_peft(folder, model)
    assert (logits(merged(model, adapter)) - expected).abs().max() < 2e-5
    if adapter.weights:
        return  # no adapter that Weft trains has full weights
    (tmp_path / "back").mkdir()
    write_peft(tmp_path / "back", model.config, adapter.layers, rslora=CASES[case][2].get("use_rslora", False))
    assert (logits(load_in_peft(base, tmp_path / "back")) - expected).abs().max() < 1e-6
    ranks = {one.shape[0] for key, one in load_file(tmp_path / "back/adapter_model.safetensors").items() if "_A" in key}
    assert max(ranks) == max(
        one.shape[0] for key, one in load_file(folder / "adapter_model.safetensors").items() if "_A" in key
    )  # weights of one layer that share a matrix A share it again
    again = read_peft(tmp_path / "back", model)
    for name, change in adapter.layers.items():
        assert all(a is b or torch.equal(a, b) for a, b in zip(change[:2], again.layers[name][:2], strict=True))


@pytest.mark.parametrize("family", ["GPT2", "GPTNeoX", "Phi3", "Mixtral", "GptOss"])
def test_fused_layers_whose_weights_have_adapters_of_their_own(tmp_path, family):
    """Weft's adapters of q, v, gate and up have unequal A and scales; PEFT has one layer for each group of them."""
    base_model(tmp_path / "base", family)
    model = weft.load_model(tmp_path / "base")
    layers, random = {}, torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        stem = name.removesuffix(".weight")
        rank = {"q_proj": 2, "v_proj": 3, "gate_proj": 2, "up_proj": 5}.get(stem.rpartition(".")[2])
        if rank and "layers.1." in name:
            lead = weight.shape[:-2]
            a = torch.randn(*lead, rank, weight.shape[-1], generator=random)
            layers[stem] = LowRank(a, torch.randn(*weight.shape[:-1], rank, generator=random) * 0.2, rank / 4)
    write_peft(tmp_path, model.config, layers)
    before = logits(model)
    for name, change in layers.items():
        weight = dict(model.named_parameters()).get(name)
        weight = model.get_parameter(f"{name}.weight") if weight is None else weight
        weight.data.copy_(change.merged(weight))
    expected = logits(model)
    assert (expected - before).abs().max() > 1e-3
    assert (logits(load_in_peft(tmp_path / "base", tmp_path)) - expected).abs().max() < 2e-5
    assert (
        logits(merged(weft.load_model(tmp_path / "base"), read_peft(tmp_path, model))) - expected
    ).abs().max() < 2e-5


def test_experts_one_by_one_as_transformers_4_has_them(tmp_path):
    torch.manual_seed(1)
    base_model(tmp_path / "base", "Mixtral")
    stored, experts = {}, ROWS["Mixtral"]["as is"]["num_local_experts"]
    for layer in range(MOE["num_hidden_layers"]):
        for expert in range(experts):
            for name, (rows, columns) in {"w1": (100, 48), "w3": (100, 48), "w2": (48, 100)}.items():
                key = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                stored[f"{key}.lora_A.weight"] = torch.randn(3, columns) * 0.3
                stored[f"{key}.lora_B.weight"] = torch.randn(rows, 3) * 0.3
    save_file(stored, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": ["w1", "w2", "w3"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = weft.load_model(tmp_path / "base")
    before = logits(model)
    adapter = read_peft(tmp_path, model)
    assert adapter.layers["layers.0.mlp.experts.up_proj"].a.shape == (experts, 3, 48)
    found = logits(merged(model, adapter))
    expected = logits(load_in_peft(tmp_path / "base", tmp_path))
    assert (found - before).abs().max() > 1e-3
    assert (found - expected).abs().max() < 2e-5


def drop(key):
    def change(config, stored):
        del stored[next(one for one in stored if key in one)]

    return change


def replaced(key, tensor):
    def change(config, stored):
        stored[next((one for one in stored if key in one), key)] = tensor

    return change


def keys(**values):
    return lambda config, stored: config.update(values)


Q = "layers.0.self_attn.q_proj"
MISTAKES = {
    "a missing matrix": (drop(f"{Q}.lora_A"), f"{Q}.lora_A.weight is missing"),
    "a key of no layer": (
        replaced("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", torch.zeros(4, 48)),
        "layers.9.mlp.up_proj.lora_A.weight does not belong to the model",
    ),
    "a key outside target_modules": (
        replaced("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", torch.zeros(4, 48)),
        "layers.0.mlp.up_proj.lora_A.weight is not in target_modules",
    ),
    "an adapter's name in a key": (
        replaced(f"base_model.model.model.{Q}.lora_A.default.weight", torch.zeros(4, 48)), "does not belong",
    ),
    "another rank": (keys(r=5), r"q_proj.lora_A.weight has shape \[4, 48\], but .* require \[5, 48\]"),
    "another base": (replaced(f"{Q}.lora_B", torch.zeros(40, 4)), r"has shape \[40, 4\].* use 'some/base'"),
    "integers": (replaced(f"{Q}.lora_B", torch.zeros(48, 4, dtype=torch.int32)), "has dtype torch.int32"),
    "DoRA without magnitudes": (keys(use_dora=True), "lora_magnitude_vector is missing"),
    "a missing full weight": (keys(modules_to_save=["lm_head"]), r"lm_head.weight \(modules_to_save\) is missing"),
    "more layers": (keys(target_modules=["q_proj", "v_proj", "k_proj"]), "k_proj.lora_A.weight is missing"),
    "no layers": (lambda config, stored: (config.update(target_modules=["x"]), stored.clear()), "match none"),
    "another method": (keys(peft_type="IA3"), "peft_type: 'IA3' is not supported.* merge the adapter with PEFT"),
    "an option": (keys(trainable_token_indices=[1]), r"trainable_token_indices: \[1\] is not supported"),
    "a future option": (keys(use_later=True), "use_later: True is not supported"),
    "PiSSA against its residual": (keys(init_lora_weights="pissa_niter_4"), "path_initial_model_for_weight_conversion"),
    "a wrong type": (keys(r="4"), "r: '4' is not a positive integer"),
    "a wrong expression": (keys(rank_pattern={"(": 2}), "is not a regular expression"),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    base = base_model(path / "base", "Llama")
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    randomized(peft.get_peft_model(base, peft.LoraConfig(r=4, **options)), 0.3).save_pretrained(path / "adapter")
    return path, weft.load_model(path / "base")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_refused(tmp_path, llama, mistake):
    """PEFT only warns of missing and unexpected keys (huggingface/peft#1678, #2699)."""
    path, model = llama
    change, words = MISTAKES[mistake]
    config = json.loads((path / "adapter/adapter_config.json").read_text())
    config["base_model_name_or_path"] = "some/base"
    stored = load_file(path / "adapter/adapter_model.safetensors")
    change(config, stored)
    save_file(stored, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(weft.UserError, match=words) as caught:
        read_peft(tmp_path, model)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "adapter_") in str(caught.value)


def test_missing_and_damaged_files_are_refused(tmp_path, llama):
    path, model = llama
    with pytest.raises(weft.UserError, match="no such folder"):
        read_peft(tmp_path / "absent", model)
    with pytest.raises(weft.UserError, match=r"adapter_config.json is missing"):
        read_peft(tmp_path, model)
    (tmp_path / "adapter_config.json").write_bytes((path / "adapter/adapter_config.json").read_bytes())
    with pytest.raises(weft.UserError, match=r"adapter_model.safetensors is missing; download"):
        read_peft(tmp_path, model)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(weft.UserError, match="is a pickle, which is not read"):
        read_peft(tmp_path, model)
    content = (path / "adapter/adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(content[:-7])
    with pytest.raises(weft.UserError, match="truncated"):
        read_peft(tmp_path, model)


def test_an_adapter_of_a_tied_head_is_refused(tmp_path):
    """Merged with the embedding's weight, it would change the embedding, too (huggingface/peft#2972)."""
    base = base_model(tmp_path / "base", "Llama", {"tie_word_embeddings": True})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
        randomized(peft.get_peft_model(base, config), 0.3).save_pretrained(tmp_path / "adapter")
    with pytest.raises(weft.UserError, match=r"lm_head.* shares its weight with the embedding"):
        read_peft(tmp_path / "adapter", weft.load_model(tmp_path / "base"))


def test_what_peft_cannot_express_is_refused(tmp_path):
    model = weft.load_model(base_model(tmp_path / "base", "DeepseekV2") and tmp_path / "base")
    a, b = torch.ones(2, 48), torch.ones(100, 2)
    for name, change, words in (
        ("layers.0.mlp.up_proj", LowRank(a, b), "PEFT applies an adapter of this layer to the experts"),
        (
            "layers.1.mlp.experts.down_proj",
            LowRank(a[None], b[None], 1.0, b[None, :, 0]),
            "PEFT has no DoRA for experts",
        ),
        ("embed_tokens", LowRank(a, b), "no layer of its own"),
    ):
        with pytest.raises(weft.UserError, match=words):
            write_peft(tmp_path, model.config, {name: change})
