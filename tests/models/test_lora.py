"""Layers with adapters: outputs and gradients against the weight written out, W + s B A."""

import pytest
import torch
from torch.func import functional_call

from weft.config.adapter import AdapterSection, decoder_layers, is_stacked, layer_of, tensor_name
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.adapter import add_adapter, initial_adapter_value, is_adapter, linear_layers
from weft.models.decoder import Decoder
from weft.models.initialize import initialize

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
    add_adapter(model, section)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if is_adapter(path):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
                if path.endswith("magnitude"):
                    parameter.abs_().add_(0.5)
    return model, section


def written_out(model, section, given):
    """Name of a base weight -> the weight with the adapter, as a function of the adapter's tensors `given`."""
    layers = {layer_of(path)[0] for path in given}
    found = {}
    for layer in layers:
        name = layer if is_stacked(layer) else f"{layer}.weight"
        weight = model.get_parameter(name).detach()
        weight = weight + section.scale * given[tensor_name(layer, "lora_b")] @ given[tensor_name(layer, "lora_a")]
        magnitude = given.get(tensor_name(layer, "lora_magnitude"))
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
    given = {path: parameter.detach().clone().requires_grad_() for path, parameter in own.items()}
    expected = functional_call(plain, written_out(plain, section, given), (tokens,), {"labels": tokens})
    expected.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    for path, parameter in given.items():
        torch.testing.assert_close(own[path].grad, parameter.grad, rtol=1e-9, atol=1e-9, msg=path)
        assert parameter.grad.abs().max() > 1e-6, path


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
