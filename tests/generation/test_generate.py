"""Generation against transformers, against itself without a cache, and prompt by prompt."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft.config.model import ModelSection
from weft.errors import UserError
from weft.generation.sample import Sampling, generate_steps
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


def steps_of(model, prompts, **settings):
    how = {key: settings.pop(key) for key in list(settings) if key in Sampling.__dataclass_fields__}
    return generate_steps(model, prompts, Sampling(**{"max_new_tokens": 12, "temperature": 0.0, **how}), **settings)


def tokens(model, prompts, **settings):
    steps = list(steps_of(model, prompts, **settings))
    return [[step[i] for step in steps if step[i] is not None] for i in range(len(prompts))]


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
    assert tokens(model, [[1, 2, 3], [1, 2, 3]], first=[allowed, None])[0][0] in allowed
    assert tokens(model, [[1, 2, 3], [1, 2, 3]], first=[allowed, None])[1][0] == free


def test_a_prompt_once_more_gets_another_text(model):
    three = tokens(model, [[1, 2]] * 3, temperature=1.0)
    assert len(set(map(tuple, three))) == 3
    assert tokens(model, [[1, 2]], temperature=1.0, copies=[2])[0] == three[2]


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ([[1, 97]], {}, "token 97, but the model's last token is 96"),
        ([[1], []], {}, "has no tokens"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"temperature": float("nan")}, "temperature is nan"),
        ([[1]], {"temperature": float("inf")}, "temperature is inf"),
        ([[1]], {"temperature": -0.5}, "temperature is -0.5"),
        ([[1]], {"top_p": 0.0}, "top_p is 0.0"),
        ([[1]], {"top_k": 0}, "top_k is 0"),
    ],
)
def test_mistakes_are_told_at_the_call(model, prompts, settings, said):
    with pytest.raises(UserError, match=said):
        steps_of(model, prompts, **settings)


def test_the_model_trains_on_as_before_when_the_reader_leaves(model):
    model.train()
    steps = generate_steps(model, [[1, 2]], Sampling(max_new_tokens=9))
    next(steps)
    assert not model.training
    steps.close()
    assert model.training
