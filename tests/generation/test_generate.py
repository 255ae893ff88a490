"""Generation against transformers, against itself without a cache, and prompt by prompt."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft.config.model import ModelSection
from weft.data.tokenizers.tokenizer import Prompt
from weft.errors import UserError
from weft.generation.engine import Engine
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models.build import build_model
from weft.models.initialize import initialize

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model():
    model = build_model(ModelSection(**SHAPE, initializer_range=0.3)).to(torch.float64)
    initialize(model, 3)
    return model.eval()


def tokens(model, prompts, **settings):
    how = {key: settings.pop(key) for key in list(settings) if key in Sampling.__dataclass_fields__}
    return generate_ids(model, prompts, Sampling(**{"max_new_tokens": 12, "temperature": 0.0, **how}), **settings)


def test_greedy_equals_transformers_generate():
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE, rms_norm_eps=1e-5, initializer_range=0.3)).eval()
    ours = build_model(ModelSection(**SHAPE)).eval()
    names = (("model.", ""), ("self_attn", "attention"), ("input_layernorm", "attention_norm"))
    state = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in (*names, ("post_attention_layernorm", "mlp_norm")):
            name = name.replace(old, new)
        state[name] = tensor
    ours.load_state_dict(state)
    prompt = [5, 6, 7, 8]
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert tokens(ours, [prompt])[0] == expected[0, 4:].tolist()


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8}]
)
def test_with_and_without_a_cache_and_alone_or_together(model, settings):
    prompts = [[1, 2, 3, 4, 5, 6], [9], [7, 8]]
    together = tokens(model, prompts, seed=5, **settings)
    assert together == tokens(model, prompts, seed=5, cache=False, **settings)
    assert together == [tokens(model, [prompt], seed=5, **settings)[0] for prompt in prompts]


def test_the_seed_decides(model):
    first, again, other = (tokens(model, [[1, 2]], temperature=1.0, seed=s)[0] for s in (1, 1, 2))
    assert first == again != other


def test_it_stops_at_a_stop_token(model):
    free = tokens(model, [[1, 2, 3]])[0]
    assert tokens(model, [[1, 2, 3]], stop_ids={free[3]})[0] == free[: free.index(free[3]) + 1]


def test_top_k_and_top_p_draw_from_the_likeliest_only(model):
    logits = model(torch.tensor([[1, 2, 3]]))[0, -1]
    likeliest = set(logits.topk(3).indices.tolist())
    drawn = {tokens(model, [[1, 2, 3]], max_new_tokens=1, temperature=2.0, top_k=3, seed=s)[0][0] for s in range(60)}
    assert drawn == likeliest
    order = logits.softmax(-1).sort(descending=True)
    nucleus = set(order.indices[: int((order.values.cumsum(-1) < 0.5).sum()) + 1].tolist())
    drawn = {tokens(model, [[1, 2, 3]], max_new_tokens=1, temperature=1.0, top_p=0.5, seed=s)[0][0] for s in range(60)}
    assert drawn <= nucleus


def test_a_temperature_near_zero_is_greedy(model):
    assert tokens(model, [[1, 2, 3]], temperature=1e-320) == tokens(model, [[1, 2, 3]])


def test_learned_positions_end_somewhere():
    section = ModelSection(**{**SHAPE, "max_position_embeddings": 8, "position": "learned"})
    model = build_model(section)
    initialize(model, 0)
    with pytest.raises(UserError, match="8"):
        tokens(model, [[1, 2, 3]])


def test_the_first_token_is_one_of_those_allowed(model):
    free = tokens(model, [[1, 2, 3]], max_new_tokens=1)[0][0]
    allowed = {(free + 1) % 97, (free + 2) % 97}
    found = generate_ids(model, [Prompt("", [1, 2, 3], frozenset(allowed)), [1, 2, 3]], Sampling(1, temperature=0))
    assert found[0][0] in allowed
    assert found[1][0] == free


def test_a_prompt_once_more_gets_another_text(model):
    three = tokens(model, [[1, 2]] * 3, temperature=1.0)
    assert len(set(map(tuple, three))) == 3
    stream = Engine(model).submit([1, 2], Sampling(12, temperature=1.0), copy=2)
    assert [piece.token for piece in stream] == three[2]


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ([[1, 97]], {}, "token id 97, but the model has ids 0 to 96"),
        ([[1], []], {}, "has no tokens"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"temperature": float("nan")}, "temperature is nan"),
        ([[1]], {"temperature": float("inf")}, "temperature is inf"),
        ([[1]], {"temperature": -0.5}, "temperature is -0.5"),
        ([[1]], {"top_p": 0.0}, "top_p is 0.0"),
        ([[1]], {"top_k": 0}, "top_k is 0"),
        ([[1]], {"min_p": 1.5}, "min_p is 1.5"),
        ([[1]], {"repetition_penalty": 0}, "repetition_penalty is 0"),
        ([[1]], {"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ([[1]], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([[1]], {"stop": ("",)}, "stop string is empty"),
        ([[1]], {"stop": (5,)}, "stop is .5,."),
        ([[1]], {"stop": None}, "stop is None"),
        ([[1]], {"logit_bias": {97: 1.0}}, "logit_bias has the token id 97, but the model has ids 0 to 96"),
        ([[1]], {"logit_bias": {1.5: 1.0}}, "logit_bias is .1.5: 1.0"),
        ([[1]], {"logit_bias": {1: float("inf")}}, "logit_bias is .1: inf"),
        ([[1]], {"temperature": "1"}, "temperature is '1'; set it to a number"),
        ([[1]], {"temperature": 1.0, "top_k": 2.5}, "top_k is 2.5; set it to an integer"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens is 1.5; set it to an integer"),
        ([[1]], {"seed": None}, "seed is None; set it to an integer"),
        ([["a"]], {}, "a prompt of token ids has 'a'"),
        ([[1]], {"max_step_tokens": 0}, "max_step_tokens is 0"),
        ([[1]], {"stop": ("a",)}, "need a tokenizer"),
        ([[1]], {"top_k": 5}, "top_k has no effect with temperature 0"),
        ([[1] * 9], {"max_cache_tokens": 16}, "9 prompt tokens and 12 new tokens do not fit .* 16 tokens"),
    ],
)
def test_mistakes_are_told_at_the_call(model, prompts, settings, said):
    with pytest.raises(UserError, match=said):
        tokens(model, prompts, **settings)


def test_the_model_trains_on_as_before(model):
    model.train()
    stream = Engine(model).submit([1, 2], Sampling(max_new_tokens=9))
    next(stream)
    assert model.training


def test_one_stop_string_is_not_its_characters():
    assert Sampling(1, stop="ab").stop == ("ab",)
