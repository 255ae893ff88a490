"""Generation against transformers, against itself without a cache, and prompt by prompt."""

import math
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.cli.main import main
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


def windowed(**keys):
    model = build_model(ModelSection(**{**SHAPE, "max_position_embeddings": 8, "initializer_range": 0.3, **keys}))
    initialize(model, 0)
    return model.eval()


@pytest.mark.parametrize(
    "options", [{}, {"lookup": 3}, {"batch_invariant": True, "lookup": 2}, {"cache": False}], ids=str
)
@pytest.mark.parametrize("position", ["learned", "rope", "alibi"])
def test_a_text_ends_at_the_models_maximum_length(position, options):
    model, longer = windowed(position=position), windowed(position=position, max_position_embeddings=64)
    longer.load_state_dict(model.state_dict() if position != "learned" else longer.state_dict())
    engine = Engine(model, **options)
    with pytest.warns(UserWarning, match="at the maximum length of 8 tokens, before 12 new tokens; set max"):
        pieces = list(engine.submit([1, 2, 3], Sampling(12, temperature=0)))
    assert [piece.finish for piece in pieces] == [None] * 4 + ["length"]
    assert engine.blocks.free == len(engine.blocks)
    if position != "learned":
        assert [piece.token for piece in pieces] == tokens(longer, [[1, 2, 3]], max_new_tokens=5)[0]
    with pytest.raises(UserError, match=r"8 prompt tokens and 12 new tokens .* maximum length of 8 tokens.* shorten"):
        engine.submit([1] * 8, Sampling(12))
    with pytest.raises(UserError, match="9 prompt tokens"):
        weft.generate(model, [[1], [1] * 9])
    assert [p.token is None for p in engine.submit([1] * 7, Sampling(1))] == [False]


def test_the_maximum_length_can_be_set():
    model, longer = windowed(), windowed(max_position_embeddings=64)
    with pytest.warns(UserWarning, match="20 positions, but the model's max_position_embeddings is 8"):
        found = weft.generate(model, [1] * 9, max_new_tokens=11, max_length=20, ignore_eos=True)
    assert found == weft.generate(longer, [1] * 9, max_new_tokens=11, ignore_eos=True)
    with pytest.warns(UserWarning, match="of 4 tokens, before 4 new"):
        assert len(weft.generate(longer, [1, 2], max_new_tokens=4, max_length=4)) == 2
    with pytest.raises(UserError, match="max_length needs 9 positions, but the model has only 8; lower max_length"):
        weft.generate(windowed(position="learned"), [1], max_length=9)
    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 8}
    for kind in ("dynamic", "yarn"):  # config.json files give the original length
        longer = windowed(rope_scaling=scaling | {"rope_type": kind})
        assert len(weft.generate(longer, [1] * 12, max_new_tokens=12)) == 12


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
        ([[1]], {"stop": ("",)}, "stop has an empty string"),
        ([[1]], {"stop": (5,)}, "stop is .5,."),
        ([[1]], {"stop": None}, "stop is None"),
        ([[1]], {"logit_bias": {97: 1.0}}, "logit_bias has the token id 97, but the model has ids 0 to 96"),
        ([[1]], {"logit_bias": {1.5: 1.0}}, "logit_bias is .1.5: 1.0"),
        ([[1]], {"logit_bias": {1: float("inf")}}, "logit_bias is .1: inf"),
        ([[1]], {"max_length": 1}, "max_length is 1; set it to at least 2"),
        ([[1]], {"max_length": "9"}, "max_length is '9'; set it to an integer"),
        ([[1]], {"temperature": "1"}, "temperature is '1'; set it to a number"),
        ([[1]], {"temperature": 1.0, "top_k": 2.5}, "top_k is 2.5; set it to an integer"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens is 1.5; set it to an integer"),
        ([[1]], {"seed": None}, "seed is None; set it to an integer"),
        ([["a"]], {}, "a prompt of token ids has 'a'"),
        ([[[1]]], {}, "a prompt of token ids has .1."),
        ([[1]], {"max_step_tokens": 0}, "max_step_tokens is 0"),
        ([[1]], {"stop": ("a",)}, "need a tokenizer"),
        ([[1]], {"top_k": 5}, "top_k has no effect with temperature 0"),
        ([[1] * 9], {"max_cache_tokens": 16}, "9 prompt tokens and 12 new tokens do not fit .* 16 tokens"),
    ],
)
def test_mistakes_are_reported_at_the_call(model, prompts, settings, said):
    with pytest.raises(UserError, match=said):
        tokens(model, prompts, **settings)


def test_the_model_trains_on_as_before(model):
    model.train()
    stream = Engine(model).submit([1, 2], Sampling(max_new_tokens=9))
    next(stream)
    assert model.training


def test_one_stop_string_is_not_its_characters():
    assert Sampling(1, stop="ab").stop == ("ab",)


NEVER = {"logit_bias": dict.fromkeys(range(97), -math.inf)}


@pytest.mark.parametrize(
    "options", [{}, {"lookup": 3}, {"draft": True}, {"draft": True, "batch_invariant": True}], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_without_a_finite_logit_fails_and_others_go_on(model, options, temperature):
    """Its keys and values are NaN, too, and must not reach requests beside it or after it."""
    options = {name: model if value is True and name == "draft" else value for name, value in options.items()}
    engine = Engine(model, max_cache_tokens=128, max_step_tokens=10, **options)
    how, prompts = {"temperature": temperature}, ([5, 6, 7], list(range(40, 60)))
    expected = [generate_ids(model, [prompt], Sampling(20, **how), **options)[0] for prompt in prompts]
    huge = torch.full((32, 1), 1e300, dtype=torch.float64)
    engine.add_adapter("huge", {f"layers.{i}.attention.q_proj": (huge.T, huge) for i in range(2)})
    for _ in range(3):
        good = [engine.submit(prompt, Sampling(20, **how)) for prompt in prompts]
        broken = engine.submit(list(range(1, 36)), Sampling(5, **how), adapter="huge")
        forbidden = engine.submit([5, 6, 7], Sampling(20, **how, **NEVER))
        with pytest.raises(UserError, match="logits are NaN or infinite; check the weights of the model and of the ad"):
            list(broken)
        with pytest.raises(UserError, match="forbid every token; allow"):
            next(forbidden)  # before any piece
        assert broken.finished
        assert forbidden.finished
        assert [[piece.token for piece in stream] for stream in good] == expected
    assert engine.blocks.free == len(engine.blocks)


def test_weights_that_are_nan(model):
    good = weft.generate(model, [1, 2, 3], max_new_tokens=20, ignore_eos=True)
    weight, value = model.layers[0].mlp.up_proj.weight.data, model.layers[0].mlp.up_proj.weight[0, 0].item()
    weight[0, 0] = math.nan
    for options in ({}, {"draft": model, "temperature": 0.8}, {"lookup": 2}):
        with pytest.raises(UserError, match="logits are NaN or infinite; check"):
            weft.generate(model, [1, 2, 3], max_new_tokens=20, ignore_eos=True, **options)
    weight[0, 0] = value
    assert weft.generate(model, [1, 2, 3], max_new_tokens=20, ignore_eos=True) == good
    whole = build_model(model.config).to(torch.float64).eval()
    whole.load_state_dict(model.state_dict())
    weight[0, 0] = math.nan
    with pytest.raises(UserError, match="the draft model's logits are NaN or infinite"):
        weft.generate(whole, [1, 2, 3], draft=model)


def test_a_request_that_fills_the_cache_exactly(model):
    for options in ({"lookup": 4}, {"lookup": 4, "batch_invariant": True}, {"draft": model, "batch_invariant": True}):
        engine = Engine(model, max_cache_tokens=48, **options)
        streams = [engine.submit([1, 2] * 8, Sampling(32, temperature=0)) for _ in range(2)]
        expected = tokens(model, [[1, 2] * 8], max_new_tokens=32)[0]
        assert [[piece.token for piece in stream] for stream in streams] == [expected] * 2


def test_samples_of_a_training_run(run_yaml, tmp_path, capsys):
    """A prompt that is too long is refused before training; logits that are not finite do not end the training."""
    keys = {"training": {"steps": 1}, "schedule": {"warmup_steps": 0}, "data": {"validation": None}}
    keys |= {"log": {"trackers": []}}
    assert main(["train", str(run_yaml(**keys, samples={"prompts": ["ka", "ka lo " * 2000]}))]) == 2
    assert re.search(
        r"samples.prompts: [\d,]+ prompt tokens and 64 new tokens do not fit in .* length of", capsys.readouterr().err
    )
    wild = {"optimizer": {"lr": 1e30, "weight_decay": 1e30}, "samples": {"prompts": ["ka"]}, "run": {"name": "wild"}}
    assert main(["train", str(run_yaml(**keys, **wild))]) == 0
    assert "no samples at step 1: the model's logits are NaN or infinite" in capsys.readouterr().err
