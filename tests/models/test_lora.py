"""Layers with adapters: outputs and gradients against the weight written out, W + s B A."""

import pytest
import torch
from torch.func import functional_call

import weft
from weft.config.adapter import AdapterSection, decoder_layers, is_stacked, layer_of
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.adapter import add_adapter, initial_adapter_value, is_adapter, linear_layers, quantized_weights
from weft.models.build import matmul_parameters
from weft.models.decoder import Decoder
from weft.models.initialize import initialize
from weft.models.layers.blockwise import block_size, dequantize_blocks, quantize_blocks
from weft.models.layers.lora import full_weight
from weft.models.low_rank import LowRank
from weft.models.sharding import find_rule

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "initializer_range": 0.2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MODELS = {
    "llama": SMALL,
    "biases": SMALL | {"attention_bias": True, "mlp_bias": True, "mlp": "plain", "tie_word_embeddings": True},
    "experts": SMALL | {"moe": MOE | {"first_k_dense_replace": 1}},
    "latent": SMALL | {"num_key_value_heads": None, "mla": MLA},
}


def built(name, seed=0):
    model = Decoder(ModelSection.model_validate(MODELS[name])).to(torch.float64)
    initialize(model, seed)
    return model


def adapted(name, **keys):
    """A model with an adapter whose B is not 0, and the section."""
    model, section = built(name), AdapterSection.model_validate({"r": 3, "alpha": 6.0, **keys})
    weights = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    add_adapter(model, section)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if is_adapter(path):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
                if path.endswith("magnitude"):
                    parameter.abs_().add_(0.5)
        for path, (codes, scale, how) in quantized_weights(model).items():
            for target, value in zip((codes, scale), quantize_blocks(weights[path], how), strict=True):
                target.copy_(value)
    return model, section


def plain_weights(model):
    """The weights of a model with an adapter, without the adapter and dequantized."""
    quantized, found = quantized_weights(model), {}
    for path, parameter in model.named_parameters():
        if path in quantized:
            found[path] = dequantize_blocks(*quantized[path][:2])
        elif not is_adapter(path) and path.removesuffix("_scale") not in quantized:
            found[path] = parameter.detach()
    return found


def written_out(model, section, given):
    """Name of a base weight -> the weight with the adapter, as a function of the adapter's tensors `given`."""
    layers = {layer_of(path)[0] for path in given}
    found = {}
    for layer in layers:
        name, end = (layer, "_") if is_stacked(layer) else (f"{layer}.weight", ".")
        weight = model.get_parameter(name).detach()
        weight = weight + section.scale * given[f"{layer}{end}lora_b"] @ given[f"{layer}{end}lora_a"]
        magnitude = given.get(f"{layer}.lora_magnitude")
        if magnitude is not None:
            weight = magnitude.unsqueeze(1) * weight / weight.detach().norm(dim=1, keepdim=True)
        found[name] = weight
    return found


CASES = [
    ("llama", {}),
    ("llama", {"dora": True, "rslora": True}),
    ("biases", {"dora": True}),
    ("biases", {"targets": ["q_proj", "layers.1.mlp.*"]}),
    ("experts", {"targets": "all-linear"}),
    ("latent", {}),
    ("biases", {"quantize": "nf4", "targets": ["up_proj", "o_proj"], "dora": True}),
    ("experts", {"quantize": "int8", "targets": "all-linear"}),
]


@pytest.mark.parametrize(("name", "keys"), CASES, ids=str)
def test_outputs_and_gradients_are_those_of_the_weight_written_out(name, keys):
    model, section = adapted(name, **keys)
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(2))
    own = {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert own.keys() == {path for path, _ in model.named_parameters() if is_adapter(path)}
    found = model(tokens, labels=tokens)
    found.sum().backward()

    plain = built(name)
    plain.load_state_dict(plain_weights(model), strict=False)
    given = {path: parameter.detach().clone().requires_grad_() for path, parameter in own.items()}
    expected = functional_call(plain, written_out(plain, section, given), (tokens,), {"labels": tokens})
    expected.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    for path, parameter in given.items():
        torch.testing.assert_close(own[path].grad, parameter.grad, rtol=1e-9, atol=1e-9, msg=path)
        assert parameter.grad.abs().max() > 1e-6, path


@pytest.mark.parametrize("name", ["llama", "latent"])
def test_a_row_of_zeros_has_a_finite_output_and_gradient_with_dora(name):
    model, section = adapted(name, dora=True)
    plain, layer = built(name), "layers.0.attention." + ("o_proj" if name == "llama" else "kv_b_proj")
    with torch.no_grad():
        for one in (model, plain):
            one.get_parameter(f"{layer}.weight")[1] = 0
        for path, parameter in model.named_parameters():
            if path.endswith("lora_b"):
                parameter.zero_()
            elif path.endswith("lora_magnitude"):
                weight = model.get_parameter(f"{layer_of(path)[0]}.weight")
                parameter.copy_(weight.norm(dim=1))
    tokens = torch.arange(12).view(1, 12)
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-11)
    model(tokens, labels=tokens).sum().backward()
    gradient = {path: parameter.grad for path, parameter in model.named_parameters() if is_adapter(path)}
    assert all(value.isfinite().all() for value in gradient.values())
    assert gradient[f"{layer}.lora_b"][1].any()
    linear = model.get_submodule(layer)
    change = LowRank(linear.lora_a, linear.lora_b, section.scale, linear.lora_magnitude)
    for found in (full_weight(linear), change.merged(linear.weight)):
        torch.testing.assert_close(found, linear.weight, rtol=0, atol=1e-11)


def test_a_small_change_of_a_bfloat16_weight_counts_when_one_token_attends_to_latents():
    mla = MLA | {"kv_lora_rank": 512}
    model = Decoder(ModelSection.model_validate(MODELS["latent"] | {"num_hidden_layers": 1, "mla": mla}))
    initialize(model.bfloat16(), 0)
    add_adapter(model, AdapterSection.model_validate({"r": 1, "alpha": 1.0, "targets": ["kv_b_proj"]}))
    attention = model.layers[0].attention
    linear, generator = attention.kv_b_proj, torch.Generator().manual_seed(0)
    with torch.no_grad():  # weights of magnitude 1 to 2, which change by a quarter of the distance of two numbers
        sign = torch.randn(linear.weight.shape, generator=generator).sign()
        linear.weight.copy_(sign * (1 + torch.rand(sign.shape, generator=generator)))
        linear.lora_a.fill_(2**-9)
        latent, k_rope = torch.ones(1, 1, 3, 512).bfloat16(), torch.zeros(1, 1, 3, 4).bfloat16()
        q = torch.zeros(1, 4, 1, 12).bfloat16()
        values = []
        for b in (0.0, 1.0):
            linear.lora_b.fill_(b)
            values.append(attention.attend_latents(q, latent, k_rope, None).double())
    assert (values[1] - values[0]).mean().item() == pytest.approx(512 * 2**-9, rel=0.1)


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_quantized_weights_are_the_nearest_values(how):
    weight = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[0, 0] = 0
    codes, scale = quantize_blocks(weight, how)
    assert codes.numel() * codes.element_size() == weight.numel() // (2 if how == "nf4" else 1)
    assert scale.dtype == torch.bfloat16
    assert weight.shape[-1] // scale.shape[-1] == block_size(96) == 4
    levels = torch.tensor(normal_quantiles() if how == "nf4" else [float(level) for level in range(-127, 128)])
    blocks = weight.unflatten(-1, (-1, 4))
    choices = scale.double().unsqueeze(-1).unsqueeze(-1) * levels.double()  # [3, 5, blocks, 1, levels]
    best = (blocks.unsqueeze(-1) - choices).abs().min(-1).values
    found = dequantize_blocks(codes, scale.double())
    torch.testing.assert_close((found - weight).abs(), best.flatten(-2), rtol=0, atol=2e-6)
    assert not found[0, 0].any()
    torch.testing.assert_close(dequantize_blocks(codes, scale).double(), found, rtol=2**-7, atol=0)
    weight[1, 2, 3] = torch.nan
    with pytest.raises(UserError, match="infinite or NaN"):
        quantize_blocks(weight, how)
    assert block_size(4096) == 64
    assert (block_size(11008), 11008 // 32 % 8) == (32, 0)  # so that 8 ranks of `tp` have full blocks


def normal_quantiles(offset=0.9677083):
    """The 16 values of NF4 by appendix E of the paper: 8 quantiles on one side of 0, 7 on the other, divided by 1."""
    normal = torch.distributions.Normal(0.0, 1.0)
    positive = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat((positive, negative, torch.zeros(1, dtype=torch.float64))).sort().values
    return (values / values.max()).tolist()


def test_backward_keeps_no_dequantized_weight():
    model, _ = adapted("llama", quantize="nf4")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model(torch.arange(6).view(1, 6))
    weights = {(32, 32), (16, 32), (48, 32), (32, 48)}
    shapes = {tuple(tensor.shape) for tensor in saved if tensor.is_floating_point()}
    assert not weights & (shapes | {shape[::-1] for shape in shapes})
    assert any(tensor.dtype == torch.uint8 for tensor in saved)


def test_the_layers_are_known_without_building_the_model():
    for keys in MODELS.values():
        section = ModelSection.model_validate(keys)
        with torch.device("meta"):
            model = Decoder(section)
        shapes = {}
        for name, module in linear_layers(model).items():
            weight = getattr(module, name.rpartition(".")[2]) if is_stacked(name) else module.weight
            shapes[name] = tuple(weight.shape)
        expected = decoder_layers(section)
        assert list(shapes) == list(expected)
        for name, (out, size, experts) in expected.items():
            assert shapes[name] == ((out, size) if experts is None else (experts, out, size))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("llama", {"targets": ["q_prj"]}, "'q_prj' matches no layer; did you mean 'q_proj'"),
        ("llama", {"targets": ["lm_head"]}, "the output head cannot have an adapter"),
        ("llama", {"targets": ["c_attn_x"]}, "the layers are called q_proj, k_proj"),
        ("experts", {"targets": "all-linear", "dora": True}, "adapter.dora: stacked experts"),
        ("experts", {"targets": ["experts.up_proj"], "dropout": 0.1}, "adapter.dropout: stacked experts"),
        ("latent", {"quantize": "nf4"}, "q_b_proj has 12 inputs, which is not a multiple of 16"),
    ],
    ids=str,
)
def test_what_is_refused(name, keys, message):
    with pytest.raises(UserError, match=message):
        add_adapter(built(name), AdapterSection.model_validate(keys))


def test_a_new_adapter_changes_nothing_and_begins_like_a_linear_layer():
    model, section = built("llama"), AdapterSection.model_validate({"r": 64})
    add_adapter(model, section)
    weight = model.get_parameter("layers.0.mlp.up_proj.lora_a")
    value = initial_adapter_value("layers.0.mlp.up_proj.lora_a", weight.shape, section, 3, torch.float32)
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 64).weight  # kaiming_uniform_(a=sqrt(5))
    assert value.abs().max() <= 32**-0.5
    assert value.std() == pytest.approx(linear.std().item(), rel=0.05)
    assert not initial_adapter_value("layers.0.mlp.up_proj.lora_b", weight.shape, section, 3, torch.float32).any()
    gaussian = section.model_copy(update={"init": "gaussian"})
    value = initial_adapter_value("layers.0.mlp.up_proj.lora_a", weight.shape, gaussian, 3, torch.float32)
    assert value.std() == pytest.approx(1 / 64, rel=0.05)


@pytest.mark.parametrize("keys", [{}, {"dora": True, "rslora": True}], ids=str)
def test_loss_and_gradients_are_those_of_peft(tmp_path, keys):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    model = weft.load_model(tmp_path, dtype=torch.float64)
    section = AdapterSection.model_validate({"r": 3, "alpha": 6.0, **keys})
    add_adapter(model, section)
    own = {path: parameter for path, parameter in model.named_parameters() if is_adapter(path)}
    theirs = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(tmp_path).to(torch.float64),
        peft.LoraConfig(
            r=3, lora_alpha=6, target_modules="all-linear", use_dora=section.dora, use_rslora=section.rslora
        ),
        autocast_adapter_dtype=False,
    ).to(torch.float64)
    pairs = {}
    for path, parameter in theirs.named_parameters():
        name = path.removeprefix("base_model.model.model.").replace("self_attn", "attention").replace(".default", "")
        for old, new in (("A.weight", "a"), ("B.weight", "b"), ("magnitude_vector.weight", "magnitude")):
            name = name.replace(f"lora_{old}", f"lora_{new}")
        if name in own:
            pairs[name] = parameter
            value = torch.randn(parameter.shape, dtype=torch.float64) * 0.2
            parameter.data = value.abs() + 0.5 if name.endswith("magnitude") else value
            own[name].data = parameter.data.clone()
    assert pairs.keys() == own.keys()
    tokens = torch.randint(64, (2, 12))
    expected = theirs.train()(tokens, labels=tokens).loss
    found = -model.train()(tokens[:, :-1], labels=tokens[:, 1:]).mean()
    expected.backward()
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)  # Transformers' norms and loss are in float32
    for name, parameter in pairs.items():
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=0, atol=5e-6, msg=name)
        assert parameter.grad.abs().max() > 1e-3, name


def test_a_custom_parameter_whose_name_ends_like_scales_is_none():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Parameter(torch.ones(4, 6))
            self.proj_scale = torch.nn.Parameter(torch.ones(4, 2))

    model = Scaled()
    assert not quantized_weights(model)
    assert matmul_parameters(model) == 4 * 6 + 4 * 2
    assert [find_rule({"*.q_scale": 1, "*.q": 0}, name) for name in ("a.q", "a.q_scale", "a.k_scale")] == [0, 1, None]
    assert find_rule({"*.q": 0}, "a.q_scale") is None
    table = {"*.o_proj.weight": 1, "*.experts.down_proj": 2}
    assert find_rule(table, "a.o_proj.weight_scale") == 1
    assert find_rule(table, "a.experts.down_proj_scale") == 2
