"""Parts of a decoder by name or of the user's own: the same numbers as the built-ins that they repeat."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from part_cases import OWN, PATTERNS, SHAPE, decoder, packed, the_same, tokens
from torch import nn

from weft.config.model import ModelSection
from weft.errors import UserError
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models.build import build_model
from weft.models.huggingface_weights import to_config_json
from weft.models.initialize import initial_value, initialize
from weft.models.roles import parameter_roles

pytestmark = pytest.mark.usefixtures("my_parts")


@pytest.mark.parametrize(
    ("own", "built_in"),
    [
        ({"norm": "my_parts:Norm"}, {"norm": "rmsnorm"}),
        ({"norm": "torch.nn:LayerNorm", "norm_placement": "both"}, {"norm": "layernorm", "norm_placement": "both"}),
        ({"hidden_act": "my_parts:Act"}, {"hidden_act": "silu"}),
        ({"hidden_act": "torch.nn:GELU", "mlp": "plain"}, {"hidden_act": "gelu", "mlp": "plain"}),
        ({"position": "my_parts:Complex"}, {"position": "rope"}),
        ({"position": "my_parts:Complex", "no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 0]}),
        ({"attention_implementation": "my_parts:Attention"}, {"attention_implementation": "auto"}),
        ({"attention_implementation": "my_parts:Attention", "sliding_window": 4}, {"sliding_window": 4}),
        ({"attention_implementation": "sdpa"}, {}),
        ({"attention_pattern": {"type": "sliding", "window": 6}}, {"sliding_window": 6}),
    ],
)
def test_a_part_of_ones_own_is_the_built_in_that_it_repeats(own, built_in):
    the_same(decoder(**own), decoder(**built_in))


@pytest.mark.parametrize("keys", [{}, {"sliding_window": 4}, {"attention_pattern": PATTERNS[0]}])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_of_ones_own_gets_no_biases_of_alibi(keys, documents):
    model = decoder(attention_implementation="my_parts:Attention", position="alibi", **keys)
    masks = []
    for layer in model.layers:
        own = layer.attention.attend.own
        layer.attention.attend.own = lambda q, k, v, mask, own=own: masks.append(mask) or own(q, k, v, mask)
    segments, positions = packed()
    out = model(tokens(), positions, segments) if documents else model(tokens())
    assert len(masks) == 2
    assert all(mask.dtype == torch.bool for mask in masks if mask is not None)
    assert documents or keys or masks == [None, None]
    plain = decoder(attention_implementation="my_parts:Attention", position="none", **keys)
    torch.testing.assert_close(out, plain(tokens(), positions, segments) if documents else plain(tokens()))


def test_a_learned_table_of_ones_own_is_the_built_in():
    ours, theirs = decoder(position="my_parts:Learned"), decoder(position="learned")
    assert "position.table.weight" in parameter_roles(ours)
    ours.position.table.weight.data.copy_(theirs.embed_positions.weight)
    the_same(ours, theirs)


def test_an_initialization_of_ones_own_draws_by_seed_and_name():
    ours, again = decoder(initialization="my_parts:Normal"), decoder(initialization="my_parts:Normal")
    drawn = {name: value for name, value in ours.named_parameters() if value.dim() > 1}
    assert len({round(value.flatten()[0].item(), 7) for value in drawn.values()}) == len(drawn)  # each name its own
    for name, value in drawn.items():
        assert torch.equal(value, again.get_parameter(name))
        assert abs(value.std() / 0.2 - 1) < 0.1
    with pytest.raises(UserError, match=r"my_parts:Flat .*\(1952,\) for embed_tokens.weight"):
        decoder(initialization="my_parts:Flat")


def test_parameters_of_ones_own_begin_as_their_class_says_and_have_roles():
    section = ModelSection(**SHAPE | OWN | {"norm": "my_parts:Noisy"})
    with torch.device("meta"):
        meta = build_model(section)
    state = torch.random.get_rng_state()
    values = {name: initial_value(meta, name, seed=4) for name, _ in meta.named_parameters()}
    assert torch.equal(state, torch.random.get_rng_state())
    gains = [value for name, value in values.items() if name.endswith("gain")]
    assert len(gains) == 5
    assert not torch.equal(gains[0], gains[1])
    assert all(0.85 < gain.mean() < 1.15 and gain.std() > 0.01 for gain in gains)
    assert values["layers.1.mlp.activation.slope"].item() == 1.0
    again = {name: initial_value(build_model(section), name, seed=4) for name in values}
    assert all(torch.equal(values[name], again[name]) for name in values)
    assert not torch.equal(initial_value(meta, "norm.gain", seed=5), values["norm.gain"])
    meta.to_empty(device="cpu")
    initialize(meta, seed=4)
    assert meta.position.freqs[0] == 1  # a buffer
    roles = parameter_roles(meta)
    assert {name for name, role in roles.items() if role == "norm"} == {n for n in roles if n.endswith("gain")}
    assert roles["layers.0.mlp.activation.slope"] == "other"


def apart(model):
    """The packed rows, and each document alone."""
    segments, positions = packed()
    whole = model(tokens(), segments=segments, positions=positions)
    alone = []
    for row, ids in enumerate(segments):
        parts = [tokens()[row : row + 1, ids == document] for document in ids.unique()]
        alone.append(torch.cat([model(part) for part in parts], 1))
    return whole, torch.cat(alone)


CHOICES = [*({"attention_pattern": pattern} for pattern in PATTERNS), OWN, {"attention_implementation": "flash"}]
ids = [*(pattern["type"] for pattern in PATTERNS), "own", "flash"]


@pytest.mark.parametrize("choice", CHOICES, ids=ids)
def test_documents_are_kept_apart(choice):
    model = decoder(**choice).eval()
    with torch.no_grad():  # without a GPU, flash is for training alone an error
        whole, alone = apart(model)
    assert (whole - alone).abs().max() < 1e-9


@pytest.mark.parametrize("choice", CHOICES, ids=ids)
def test_generation_with_a_cache_is_that_without(choice):
    model = decoder(**choice).eval()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9], [7, 8]]

    def greedy(prompts, **settings):
        return generate_ids(model, prompts, Sampling(12, temperature=0.0), **settings)

    together = greedy(prompts)
    assert together == greedy(prompts, cache=False)
    assert together == [greedy([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids[:-2])
def test_a_pattern_changes_the_model_and_latent_attention_knows_it(pattern):
    mla = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
    for more in ({}, {"mla": mla, "num_key_value_heads": 4}):
        sparse, full = decoder(attention_pattern=pattern, **more), decoder(**more)
        assert (sparse(tokens())[:, 0] - full(tokens())[:, 0]).abs().max() < 1e-12
        assert (sparse(tokens()) - full(tokens())).abs().max() > 1e-3


@pytest.mark.parametrize(
    "choice",
    [
        OWN,
        pytest.param({"attention_pattern": PATTERNS[3]}, marks=pytest.mark.long),
        pytest.param({"attention_implementation": "sdpa"}, marks=pytest.mark.long),
        {"sliding_window": 4},
    ],
    ids=["own", "bigbird", "sdpa", "window"],
)
def test_compiled_blocks_are_one_graph(choice):
    segments, positions = packed()
    model = decoder(**choice)
    expected = model(tokens(), segments=segments, positions=positions)
    for block in model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch._dynamo.config.patch(error_on_recompile=_ == 1):
            out = model(tokens(), segments=segments, positions=positions)
    assert (out - expected).abs().max() < 1e-9
    out.sum().backward()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hidden_act": "my_parts:Act"}, "model.hidden_act is 'my_parts:Act'.*LlamaForCausalLM"),
        ({"attention_implementation": "my_parts:Attention"}, "model.attention_implementation is 'my_parts:Attention'"),
        ({"attention_pattern": PATTERNS[0]}, r"model.attention_pattern is \{type: sliding, ...\}.*LlamaForCausalLM"),
    ],
)
def test_what_hugging_face_has_no_code_for_is_reported(keys, said):
    with pytest.raises(UserError, match=said):
        to_config_json(ModelSection(**SHAPE | keys))


def test_what_computes_the_same_is_exported():
    chosen = {"attention_implementation": "flex", "initialization": "my_parts:Normal"}
    assert to_config_json(ModelSection(**SHAPE | chosen)) == to_config_json(ModelSection(**SHAPE))


def test_a_norm_without_parameters_may_return_what_it_likes():
    class Plain(nn.Module):
        def __init__(self, width, eps):
            super().__init__()

        def forward(self, x):
            return F.layer_norm(x.double(), x.shape[-1:])

    sys.modules["my_parts"] = types.SimpleNamespace(Plain=Plain)
    model = decoder(torch.bfloat16, norm="my_parts:Plain")
    assert model(tokens()).isfinite().all()
