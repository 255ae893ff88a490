"""Speculative decoding against the same engine without proposals, and against the probabilities of forward passes."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_engine import KINDS, SAMPLE, SHAPE, decoder, schedule

from weft.config.model import ModelSection
from weft.data.tokenizers.tokenizer import Prompt, Tokenizer
from weft.errors import UserError
from weft.generation.engine import Engine
from weft.generation.sampler import probabilities
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models.build import build_model
from weft.models.initialize import initialize

PROMPTS = [[1, 2, 3, 4, 5] * 5, [9], [7, 8, 7, 8, 7, 8], [*range(20), *range(20)]]


def other(seed=4, **keys):
    """A smaller model, which rarely agrees with `decoder`."""
    model = build_model(ModelSection(**(SHAPE | {"num_hidden_layers": 1} | keys)))
    initialize(model, seed)
    return model.eval()


def near(model):
    """A model that often agrees with `model`."""
    found, generator = build_model(model.config), torch.Generator().manual_seed(5)
    for name, weight in model.state_dict().items():
        found.state_dict()[name].copy_(weight + 0.1 * torch.randn(weight.shape, generator=generator))
    return found.eval()


def opposite(model):
    """A model whose most likely token is the least likely token of `model`."""
    found = build_model(model.config)
    found.load_state_dict(model.state_dict())
    found.lm_head.weight.data.neg_()
    return found.eval()


def pieces(model, prompt, sampling, **options):
    engine = Engine(model, **options)
    return engine, list(engine.submit(prompt, sampling))


def tokens_of(found):
    return [piece.token for piece in found]


@pytest.mark.parametrize("kind", SAMPLE)
def test_greedy_texts_are_the_same(kind):
    model, sampling = decoder(**KINDS[kind]), Sampling(20, temperature=0)
    expected = generate_ids(model, PROMPTS, sampling)
    for options in (
        {"lookup": 4},
        {"draft": near(model)},
        {"draft": other(**KINDS[kind]), "draft_tokens": 2},
        {"draft": model, "max_step_tokens": 6},  # chunks of prompts
        {"draft": model, "max_cache_tokens": 64},  # preemption
    ):
        assert generate_ids(model, PROMPTS, sampling, **options) == expected


def test_a_draft_that_always_agrees_needs_a_step_for_each_five_tokens():
    model = decoder()
    for temperature in (0.0, 0.9):
        engine, found = pieces(model, [1, 2, 3], Sampling(40, temperature=temperature), draft=model)
        assert (len(found), engine.steps) == (40, 40 // 5)
        assert engine.accepted_tokens == engine.proposed_tokens == 32


def test_a_draft_that_never_agrees_needs_a_step_for_each_token():
    model = decoder()
    engine, found = pieces(model, [1, 2, 3], Sampling(30, temperature=0), draft=opposite(model))
    assert tokens_of(found) == generate_ids(model, [[1, 2, 3]], Sampling(30, temperature=0))[0]
    assert (engine.steps, engine.accepted_tokens) == (30, 0)


def test_a_lookup_proposes_what_followed_before():
    # The model has no layers: each token's successor depends on this token alone, so greedy texts repeat themselves.
    model = decoder(num_hidden_layers=1)
    for layer in model.layers:
        layer.attention.o_proj.weight.data.zero_()
    engine, found = pieces(model, [1, 2, 3], Sampling(80, temperature=0), lookup=10)
    assert tokens_of(found) == generate_ids(model, [[1, 2, 3]], Sampling(80, temperature=0))[0]
    assert engine.steps < 40
    assert engine.accepted_tokens == 80 - engine.steps


@pytest.mark.parametrize("settings", [{"temperature": 1.2}, {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 1}])
def test_a_lookup_changes_no_sampled_text(settings):
    model, sampling = decoder(), Sampling(25, **settings)
    expected = generate_ids(model, PROMPTS, sampling)
    assert generate_ids(model, PROMPTS, sampling, lookup=4) == expected
    assert generate_ids(model, PROMPTS, sampling, lookup=9, max_cache_tokens=96) == expected


PLAIN = {"temperature": 1.0}
MANY = {"temperature": 1.3, "top_p": 0.8, "top_k": 3, "logit_bias": {2: 1.0}, "presence_penalty": 1.0}


def compare_distributions(settings, count):
    """Three tokens of 4 ids: 64 texts, whose probabilities are products of those of forward passes."""
    model, prompt = decoder(vocab_size=4), [1, 2, 3]
    engine = Engine(model, draft=near(model), draft_tokens=2, max_batch=500)
    texts = [[] for _ in range(count)]
    for piece in engine.submit(prompt, Sampling(3, n=count, **settings)):
        texts[piece.index].append(piece.token)
    assert 0.3 < engine.accepted_tokens / engine.proposed_tokens < 0.95
    expected = {}
    for text in itertools.product(range(4), repeat=3):
        logits, probability = model(torch.tensor([[*prompt, *text]]))[0, 2:-1].detach(), 1.0
        for i, row in enumerate(logits.clone()):
            for token, bias in settings.get("logit_bias", {}).items():
                row[token] += bias
            row[list(set(text[:i]))] -= settings.get("presence_penalty", 0)
            probability *= probabilities(row[None], Sampling(1, **settings))[0, text[i]].item()
        expected[text] = count * probability
    counts = Counter(map(tuple, texts))
    assert all(expected[text] > 0 for text in counts)
    often = [text for text in expected if expected[text] >= 5]
    chi2 = sum((counts[text] - expected[text]) ** 2 / expected[text] for text in often)
    assert chi2 < len(often) + 4 * (2 * len(often)) ** 0.5


@pytest.mark.parametrize("settings", [PLAIN, MANY])
def test_sampled_tokens_have_the_distribution_of_the_model(settings):
    compare_distributions(settings, 700)


@pytest.mark.matrix
@pytest.mark.parametrize("settings", [PLAIN, MANY])
def test_many_sampled_tokens_have_the_distribution_of_the_model(settings):
    compare_distributions(settings, 30_000)


def random_schedules(kind, count):
    model, rng = decoder(**KINDS[kind]), random.Random(kind)
    for options in ({"lookup": 3}, {"draft": near(model), "draft_tokens": 3}):
        alone = {}
        for _ in range(count):
            schedule(model, rng, alone, **options)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.long), "both"])
def test_random_schedules_give_each_request_what_it_gets_alone(kind):
    random_schedules(kind, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_random_schedules(kind):
    random_schedules(kind, 85)


def test_batch_invariant_logits_have_the_same_bits():
    model = decoder().to(torch.bfloat16)

    def bits(prompts, sampling, **options):
        engine = Engine(model, batch_invariant=True, max_step_tokens=16, max_cache_tokens=256, **options)
        streams = [engine.submit(prompt, sampling) for prompt in prompts]
        return [[(p.token, p.logprob, p.top) for p in stream] for stream in streams], engine.accepted_tokens

    prompts = [[i % 10 for i in range(first, first + length)] for first, length in ((0, 40), (3, 1), (0, 41), (9, 70))]
    draft = {"draft": near(decoder()).to(torch.bfloat16), "draft_tokens": 3}
    for sampling, options in (
        (Sampling(30, temperature=0, logprobs=3), {"lookup": 3}),
        (Sampling(20, logprobs=1), draft),
    ):
        together, accepted = bits(prompts, sampling, **options)
        assert together == [bits([prompt], sampling, **options)[0][0] for prompt in prompts]
        assert accepted > 0


def test_texts_end_within_accepted_tokens(tiny_tokenizer):
    tokenizer = Tokenizer.load(tiny_tokenizer)
    model = decoder(vocab_size=tokenizer.vocab_size)
    for greedy in (Sampling(40, temperature=0), Sampling(23, temperature=0, repetition_penalty=1.3, logprobs=2)):
        _, free = pieces(model, "Kalo", greedy, tokenizer=tokenizer)
        text = "".join(piece.text for piece in free)
        for stop, ids in (((), ()), ((text[9:12],), ()), ((), {free[6].token})):
            sampling = replace(greedy, stop=stop)
            _, expected = pieces(model, "Kalo", sampling, tokenizer=tokenizer, stop_ids=ids)
            engine, found = pieces(
                model, "Kalo", sampling, tokenizer=tokenizer, stop_ids=ids, draft=model, draft_tokens=7
            )
            assert [(p.token, p.text, p.finish) for p in found] == [(p.token, p.text, p.finish) for p in expected]
            assert [p.logprob for p in found] == pytest.approx([p.logprob for p in expected], abs=1e-5)
            assert [[token for token, _ in p.top] for p in found] == [[token for token, _ in p.top] for p in expected]
            assert engine.steps <= len(found) // 8 + 1
            assert engine.blocks.free == len(engine.blocks)


def test_the_first_token_is_one_of_those_allowed():
    model, draft = decoder(), other()
    expected = generate_ids(model, [Prompt("", [1, 2, 3], frozenset({4, 5}))], Sampling(20, temperature=0))
    for options in ({"draft": draft}, {"draft": model}, {"lookup": 4}):
        prompt = Prompt("", [1, 2, 3], frozenset({4, 5}))
        assert generate_ids(model, [prompt], Sampling(20, temperature=0), **options) == expected
        assert generate_ids(model, [prompt], Sampling(2, seed=8), **options)[0][0] in {4, 5}


def test_texts_follow_a_schema(tiny_tokenizer):
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer.load(tiny_tokenizer)
    model = decoder(vocab_size=tokenizer.vocab_size)
    schema = {"type": "array", "items": {"enum": ["kalo", "ren"]}, "minItems": 5, "maxItems": 5}
    greedy, sampled = Sampling(99, temperature=0, json_schema=schema), Sampling(99, seed=2, json_schema=schema)
    accepted = []
    for sampling, options in (
        (greedy, {"lookup": 4}),
        (sampled, {"lookup": 4}),
        (greedy, {"draft": model}),
        (greedy, {"draft": near(model)}),
    ):
        _, expected = pieces(model, "Kalo", sampling, tokenizer=tokenizer)
        engine, found = pieces(model, "Kalo", sampling, tokenizer=tokenizer, **options)
        assert [(p.token, p.text, p.finish) for p in found] == [(p.token, p.text, p.finish) for p in expected]
        accepted.append(engine.accepted_tokens)
    assert all(accepted)
    _, found = pieces(model, "Kalo", sampled, tokenizer=tokenizer, draft=near(model))
    assert set(json.loads("".join(piece.text for piece in found))) <= {"kalo", "ren"}


def test_shared_blocks_are_those_of_the_draft_too():
    model, prompt = decoder(), list(range(1, 50))
    engine = Engine(model, draft=model)
    first = tokens_of(engine.submit(prompt, Sampling(20, temperature=0)))
    steps, computed = engine.steps, engine.computed_tokens
    again = tokens_of(engine.submit([*prompt, *first[:10]], Sampling(10, temperature=0)))
    assert again == first[10:]
    assert engine.shared_tokens == 48
    assert engine.steps - steps == 2
    assert engine.computed_tokens - computed == 11 + 4 + 5


def test_windows_release_blocks_behind_accepted_tokens():
    model, most = decoder(sliding_window=16), 0
    engine = Engine(model, draft=model, max_cache_tokens=1024)
    for _ in engine.submit([1, 2, 3], Sampling(200, temperature=0)):
        most = max(most, len(engine.blocks) - engine.blocks.free)
    assert 2 <= most <= 3


def test_no_proposals_where_the_rotary_embedding_changes_with_the_length():
    for kind, keys in (("dynamic", {}), ("longrope", {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4})):
        scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32, **keys}
        model = decoder(rope_scaling=scaling)
        with pytest.warns(UserWarning, match=f"32 tokens.*{kind}"):
            engine = Engine(model, draft=model)
        expected = generate_ids(model, [[1, 2, 3]], Sampling(50, temperature=0))[0]
        assert tokens_of(engine.submit([1, 2, 3], Sampling(50, temperature=0))) == expected
        assert engine.proposed_tokens == 0
        assert (
            tokens_of(engine.submit([1, 2, 3], Sampling(20, temperature=0)))
            == generate_ids(model, [[1, 2, 3]], Sampling(20, temperature=0))[0]
        )
        assert engine.accepted_tokens == engine.proposed_tokens > 0


class Custom(torch.nn.Module):
    def forward(self, tokens):
        return torch.zeros(*tokens.shape, 60)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (decoder, {"draft": other(vocab_size=61)}, "vocabulary has 61 tokens, the model.s 60; .*same tokenizer"),
        (decoder, {"draft": other(), "lookup": 3}, "both a draft model and lookup"),
        (decoder, {"draft": Custom()}, "draft model is a custom model"),
        (decoder, {"lookup": -1}, "lookup is -1; set it to a number from 1"),
        (decoder, {"draft": other(), "draft_tokens": 0}, "draft_tokens is 0"),
        (decoder, {"draft_tokens": 3}, "draft_tokens is 3, but there is no draft model"),
        (decoder, {"lookup": 8, "max_step_tokens": 8}, "lookup is 8; .* from 1 to 7"),
        (decoder, {"lookup": 8, "cache": False}, "lookup needs a built-in model with a cache"),
        (Custom, {"lookup": 8}, "lookup needs a built-in model with a cache"),
    ],
)
def test_mistakes_are_reported_at_once(model, options, said):
    with pytest.raises(UserError, match=said):
        Engine(model(), **options)


def test_a_draft_with_fewer_learned_positions_is_refused():
    engine = Engine(decoder(), draft=other(position="learned", max_position_embeddings=8))
    with pytest.raises(UserError, match=r"draft model, .* 13 positions, but the model has only 8"):
        engine.submit([1, 2, 3], Sampling(10))
