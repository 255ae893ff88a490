"""Weights in 8 and 4 bits: rounding, layout and products in closed form; whole models against their rounded weights."""

import copy
import json
import shutil

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig

import weft
from weft.cli.main import main
from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.generation.engine import Engine
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models import quantized
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.models.quantize import quantize, try_quantized
from weft.models.quantized import QuantizedWeight
from weft.models.transformers_model import build_transformers_model

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MLA = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 20}
MODELS = {
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "scaled and soft-capped logits": {"logits_scaling": 2.0, "logit_softcap": 3.0},
    "experts with biases": {"moe": EXPERTS | {"expert_bias": True, "router_bias": True}},
    "latent attention, shared experts": {
        "num_key_value_heads": None,
        "mla": MLA,
        "moe": EXPERTS | {"n_shared_experts": 1},
    },
}
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 80, 31, 4], [1, 2, 3, 96, 0, 4, 4, 4]])


def weight_of(shape, bits, dtype=torch.float32, source=None):
    found = QuantizedWeight(torch.Size(shape), bits, dtype).eval()
    found.fill(torch.randn(shape).flatten(0, -2) if source is None else source.flatten(0, -2))
    return found


def rounded(model, quantized_model):
    """A copy of a model whose weights are those of the quantized model, and whose head is one of its own."""
    found = copy.deepcopy(model)
    if getattr(found, "lm_head", 0) is None:
        found.lm_head = nn.Linear(*found.embed_tokens.weight.shape[::-1], bias=False)
    for name, module in quantized_model.named_modules():
        if isinstance(module, QuantizedWeight):
            found.get_parameter(name).data = module.dequantized()
    return found


@pytest.mark.parametrize("shape", [(16, 64), (7, 33), (3, 5, 40)])
def test_8_bits_round_to_the_nearest_of_255_levels(shape):
    weight = torch.randn(shape)
    found = weight_of(shape, 8, source=weight)
    step = weight.abs().amax(-1, keepdim=True) / 127
    assert found.values.shape == weight.shape
    assert found.integers().abs().max() <= 127
    assert ((found.dequantized() - weight).abs() <= 0.51 * step + 127 * step / 2**9).all()  # scales are in bfloat16
    assert torch.equal(found.dequantized(), found.values * found.scale.float().unsqueeze(-1))


@pytest.mark.parametrize("shape", [(16, 64), (7, 33), (3, 5, 40)])
def test_4_bits_are_better_than_rounding_by_the_largest_weight(shape):
    weight = torch.randn(shape)
    found = weight_of(shape, 4, source=weight)
    groups = torch.nn.functional.pad(weight, (0, -shape[-1] % 32)).unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
    plain = ((groups / scale).round() * scale - groups).square().sum(-1)
    low, high = found.values & 15, found.values >> 4  # the layout that the docstring states
    integers = torch.cat((low, high), -1).to(torch.float32) - 8
    error = (integers * found.scale.unsqueeze(-1) - groups).square().sum(-1)
    assert (error <= 1.02 * plain + 1e-4).all()  # scales are in bfloat16
    assert error.sum() < 0.85 * plain.sum()
    assert torch.equal((integers * found.scale.unsqueeze(-1)).flatten(-2)[..., : shape[-1]], found.dequantized())
    assert torch.equal(integers.flatten(-2)[..., : shape[-1]].to(torch.int8), found.integers())


def test_weights_that_are_exact_stay_exact():
    weight = torch.randint(-7, 8, (16, 64)) * 0.125
    weight[:, ::32], weight[:, 1::32], weight[3] = -8 * 0.125, 0.875, 0
    assert torch.equal(weight_of(weight.shape, 4, source=weight).dequantized(), weight)
    with pytest.raises(UserError, match="infinite or NaN"):
        weight_of((2, 32), 8, source=torch.full((2, 32), float("nan")))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "columns"), [(32, 64), (10, 40), (7, 5), (48, 33), (33, 96)])
def test_products_are_those_of_the_integers(bits, dtype, out, columns, monkeypatch):
    weight = weight_of((out, columns), bits, dtype)
    scale = weight.scale.double().unsqueeze(-1)
    exact = weight.integers().double() * (scale if bits == 8 else scale.expand(-1, -1, 32).flatten(1)[:, :columns])
    for kernels in (True, False):
        for shape in ((columns,), (1, columns), (2, 3, columns), (100, columns)):
            x = torch.randn(shape).to(dtype)
            expected = x.double() @ exact.T
            error = (weight(x).double() - expected).norm() / expected.norm()
            assert error < (1e-6 if dtype == torch.float32 else 5e-3), (kernels, shape)
        monkeypatch.setattr(quantized, f"multiply_int{bits}", None)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", ["int8", "int4"])
def test_a_decoder_computes_with_its_rounded_weights(kind, how):
    plain = build_model(ModelSection(**SHAPE | MODELS[kind]))
    initialize(plain, 3)
    plain.eval()
    small = copy.deepcopy(plain)
    quantize(small, how)
    expected = rounded(plain, small)
    names = {name.rpartition(".")[2] for name, p in small.named_parameters() if p.dim() > 1 and "bias" not in name}
    assert names <= {"weight"}  # no matrix of experts is left
    left = {name for name, p in small.named_parameters() if p.dim() > 1 and "bias" not in name}
    assert all("embed_tokens" in name or "router" in name or "kv_b_proj" in name for name in left)
    with torch.no_grad():
        torch.testing.assert_close(small(TOKENS), expected(TOKENS), rtol=1e-4, atol=1e-4)
        labels = TOKENS.roll(-1, 1)
        torch.testing.assert_close(small(TOKENS, labels=labels), expected(TOKENS, labels=labels), rtol=0, atol=1e-4)
        assert not torch.allclose(small(TOKENS), plain(TOKENS), rtol=1e-4, atol=1e-4)
    sampling = Sampling(8, temperature=0.0)
    assert generate_ids(small, TOKENS.tolist(), sampling) == generate_ids(expected, TOKENS.tolist(), sampling)


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
@pytest.mark.parametrize("how", ["int8", "int4"])
def test_the_compiled_step_computes_the_same(how):
    model = build_model(ModelSection(**SHAPE | MODELS["tied, biases"]))
    initialize(model, 3)
    quantize(model.eval(), how)
    sampling, found = Sampling(12, temperature=0.0, logprobs=0), []
    for compiled in (True, False):
        found.append(
            [(piece.token, piece.logprob) for piece in Engine(model, compile=compiled).submit([5, 6], sampling)]
        )
    assert [token for token, _ in found[0]] == [token for token, _ in found[1]]
    assert [logprob for _, logprob in found[0]] == pytest.approx([logprob for _, logprob in found[1]], abs=5e-3)


def test_models_of_transformers(tmp_path):
    shape = {key: value for key, value in SHAPE.items() if key != "initializer_range"}
    for config in (LlamaConfig(**shape), LlamaConfig(**shape, tie_word_embeddings=True)):
        section = TransformersModelSection(type="hf", path=str(tmp_path), weights=False, config=config.to_dict())
        plain = build_transformers_model(section, seed=1).eval()
        small = copy.deepcopy(plain)
        quantize(small, "int8")
        try_quantized(small)
        expected = rounded(plain, small)
        with torch.no_grad():
            for more in ({}, {"labels": TOKENS.roll(-1, 1)}):
                torch.testing.assert_close(small(TOKENS, **more), expected(TOKENS, **more), rtol=1e-4, atol=1e-4)
        kept = small.get_output_embeddings()
        assert (kept.weight is small.get_input_embeddings().weight) == config.tie_word_embeddings
    config = MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, state_size=4)
    section = TransformersModelSection(type="hf", path=str(tmp_path), weights=False, config=config.to_dict())
    mamba = build_transformers_model(section, seed=1).eval()
    quantize(mamba, "int8")
    with pytest.raises(UserError, match="does not run with quantized weights"):  # it reads a layer's weight
        try_quantized(mamba)


def test_loading_frees_the_float_weights_and_the_model_generates_but_is_not_trained(tmp_path, tiny_tokenizer):
    torch.manual_seed(2)
    wide = SHAPE | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    LlamaForCausalLM(LlamaConfig(**wide)).save_pretrained(tmp_path / "hf")
    plain = weft.load_model(tmp_path / "hf")
    ids = [[5, 6, 7]]
    for how, bits in (("int8", 8), ("int4", 4)):
        small = weft.load_model(tmp_path / "hf", quantize=how)
        loaded = copy.deepcopy(plain)
        quantize(loaded, how)
        with torch.no_grad():  # filling block by block gives the same as quantizing a loaded model
            assert torch.equal(small(TOKENS), loaded(TOKENS))
        kept = plain.embed_tokens.weight.nbytes + sum(p.nbytes for p in plain.parameters() if p.dim() == 1)
        matrices = sum(p.numel() for p in plain.parameters() if p.dim() > 1) - plain.embed_tokens.weight.numel()
        size = sum(t.nbytes for t in (*small.parameters(), *small.buffers()))
        assert size - kept <= matrices * (bits + 0.5) / 8
        assert weft.generate(tmp_path / "hf", ids, 4, quantize=how) == weft.generate(small, ids, 4)
    for call, words in (
        (small.train, "cannot be trained"),
        (small.state_dict, "cannot be saved"),
        (lambda: weft.generate(small, ids, 4, quantize="int8"), "weft.load_model"),
        (lambda: weft.load_model(tmp_path / "hf", quantize="int3"), "int8 or int4"),
        (lambda: weft.load_model(tmp_path / "hf", dtype=torch.float16, quantize="int8"), "float16"),
        (lambda: weft.load_model(tmp_path / "hf", quantize="int8", device_map={"cpu": 1e9}), "device map"),
        (lambda: quantize(nn.Embedding(3, 4), "int8"), "no linear layers"),
    ):
        with pytest.raises(UserError, match=words):
            call()


@pytest.mark.matrix
def test_perplexity_of_a_trained_model(run_yaml, tiny_heldout, tmp_path):
    assert main(["train", str(run_yaml(training={"steps": 300}))]) == 0
    found = {}
    for how in (None, "int8", "int4"):
        file = tmp_path / "found.json"
        words = [] if how is None else ["--quantize", how]
        assert main(["evaluate", str(tmp_path / "runs" / "demo"), "--json", str(file), *words]) == 0
        found[how] = json.loads(file.read_text())["all"]["perplexity"]
    assert found["int8"] < 1.005 * found[None]
    assert found["int4"] < 1.08 * found[None]
