"""Logits and gradients against transformers' own Llama and GPT-2, with the same random weights."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from weft.config.model import ModelSection
from weft.models.build import build_model

LLAMA = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 100}


def from_llama(name, tensor):
    """Where a weight of transformers' Llama is in Weft's decoder."""
    name = name.removeprefix("model.").replace("self_attn.", "attention.")
    name = name.replace("input_layernorm", "attention_norm").replace("post_attention_layernorm", "mlp_norm")
    return {name: tensor}


def from_gpt2(name, tensor):
    """The same for GPT-2, whose linear layers are transposed and whose q, k and v are one matrix."""
    name = name.removeprefix("transformer.")
    if name.startswith(("wte", "wpe", "ln_f", "lm_head")):
        for old, new in (("wte", "embed_tokens"), ("wpe", "embed_positions"), ("ln_f", "norm")):
            name = name.replace(old, new)
        return {name: tensor}
    _, layer, part, *rest = name.split(".")
    base, kind = f"layers.{layer}.", rest[-1]
    if part in ("ln_1", "ln_2"):
        return {f"{base}{'attention_norm' if part == 'ln_1' else 'mlp_norm'}.{kind}": tensor}
    tensor = tensor.T if kind == "weight" else tensor
    if rest[0] == "c_attn":
        return {f"{base}attention.{p}_proj.{kind}": t for p, t in zip("qkv", tensor.chunk(3), strict=True)}
    where = {("attn", "c_proj"): "attention.o_proj", ("mlp", "c_fc"): "mlp.up_proj", ("mlp", "c_proj"): "mlp.down_proj"}
    return {f"{base}{where[part, rest[0]]}.{kind}": tensor}


def pair(theirs, section, mapping, dtype):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    theirs = theirs.to(dtype).eval()
    ours = build_model(ModelSection(**section)).to(dtype).eval()
    state = {}
    for name, tensor in theirs.named_parameters():
        state |= mapping(name, tensor.detach())
    names = {name for name, _ in ours.named_parameters()}
    assert names == set(state)
    ours.load_state_dict(state, strict=False)
    return theirs, ours


CASES = {
    "llama": (LLAMA, {}),
    "grouped heads, odd vocabulary": (LLAMA | {"num_key_value_heads": 2}, {"vocab_size": 101}),
    "tied": (LLAMA | {"tie_word_embeddings": True}, {}),
    "biases, own head size": (LLAMA | {"head_dim": 10, "attention_bias": True, "mlp_bias": True}, {}),
    "another theta": (LLAMA | {"rope_theta": 500000.0}, {}),
}


def llama(case, dtype):
    shape, extra = CASES[case]
    section = {"vocab_size": 128, "max_position_embeddings": 64, **shape, **extra}
    theirs = {**section, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attn_implementation": "eager"}
    theta = theirs.pop("rope_theta", 10000.0)
    config = LlamaConfig(**theirs, rope_parameters={"rope_type": "default", "rope_theta": theta})
    return pair(LlamaForCausalLM(config), section, from_llama, dtype)


def gpt2(dtype):
    config = GPT2Config(vocab_size=131, n_embd=48, n_layer=3, n_head=4, n_positions=64, attn_implementation="eager")
    section = {
        "family": "gpt2", "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 192, "max_position_embeddings": 64, "position": "learned", "norm": "layernorm",
        "mlp": "plain", "hidden_act": "gelu_tanh", "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return pair(GPT2LMHeadModel(config), section, from_gpt2, dtype)


# transformers' Llama rotates and normalizes in float32 whatever its dtype: only GPT-2 can be compared more closely.
@pytest.mark.parametrize(
    ("case", "dtype", "bound"),
    [*((case, torch.float32, 1e-5) for case in [*CASES, "gpt2"]), ("gpt2", torch.float64, 1e-12)],
)
def test_logits_equal_hugging_faces(case, dtype, bound):
    theirs, ours = gpt2(dtype) if case == "gpt2" else llama(case, dtype)
    tokens = torch.randint(0, 100, (3, 33))
    expected, logits = theirs(tokens).logits, ours(tokens)
    assert logits.dtype == dtype
    assert (logits - expected).abs().max() <= bound * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("case", ["grouped heads, odd vocabulary", "tied", "gpt2"])
def test_gradients_equal_hugging_faces(case):
    theirs, ours = gpt2(torch.float32) if case == "gpt2" else llama(case, torch.float32)
    tokens = torch.randint(0, 100, (2, 20))
    theirs(tokens, labels=tokens).loss.backward()
    (-ours(tokens[:, :-1], labels=tokens[:, 1:]).mean()).backward()
    mapping, gradients = (from_gpt2 if case == "gpt2" else from_llama), {}
    for name, parameter in theirs.named_parameters():
        gradients |= mapping(name, parameter.grad)
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max() < 1e-4, name
