"""Adapters of requests against models whose weights have the adapters' deltas merged in."""

import copy
import random

import pytest
import torch
from test_engine import decoder
from test_families import pair
from torch import nn

from weft.errors import UserError
from weft.generation.adapters import LowRank
from weft.generation.engine import Engine
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids

LATENT = {"mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}}


def random_deltas(model, names, rank, seed, dora=False):
    rng, deltas = torch.Generator().manual_seed(seed), {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in names:
            a = torch.randn(rank, module.in_features, generator=rng)
            b = torch.randn(module.out_features, rank, generator=rng)
            magnitude = torch.rand(module.out_features, generator=rng) + 0.5 if dora else None
            deltas[path] = LowRank(a, b, 0.2 / rank, magnitude)
    return deltas


def merged(model, deltas):
    """A copy of a model with W + scale B A; with DoRA, each row of this sum has the norm in `magnitude`."""
    other = copy.deepcopy(model)
    for path, (a, b, scale, magnitude) in deltas.items():
        weight = other.get_submodule(path).weight.data
        weight += scale * b @ a
        if magnitude is not None:
            weight *= (magnitude / weight.square().sum(1).sqrt())[:, None]
    return other


EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, {}),
        ({"sliding_window": 9, "attention_bias": True}, {"max_step_tokens": 7, "max_cache_tokens": 112}),
        ({"num_hidden_layers": 1}, {"cache": False}),
        ({"num_hidden_layers": 1}, {"batch_invariant": True}),
        (LATENT, {}),
    ],
)
def test_requests_with_unequal_adapters_in_one_batch(keys, options):
    model, rng = decoder(**keys), random.Random(3)
    names = {"q_proj", "kv_a_proj", "o_proj", "down_proj"} if keys is LATENT else EVERY
    deltas = {"one": random_deltas(model, names, 2, 1)}
    deltas["two"] = random_deltas(model, ("q_proj", "v_proj", "o_proj"), 5, 2, dora=True)
    models = {None: model} | {name: merged(model, deltas[name]) for name in deltas}
    engine = Engine(model, **options)
    for name in deltas:
        engine.add_adapter(name, deltas[name])
    common, streams = [rng.randrange(60) for _ in range(33)], []
    for i in range(9):
        adapter = (None, "one", "two")[i % 3]
        prompt = common[: (0, 17, 33)[i // 3]] + [rng.randrange(60) for _ in range(1 + i)]
        stream = engine.submit(prompt, Sampling(10, temperature=0, logprobs=0), adapter=adapter)
        streams.append((adapter, prompt, stream))
    texts = set()
    for adapter, prompt, stream in streams:
        pieces = list(stream)
        new = [piece.token for piece in pieces]
        assert new == generate_ids(models[adapter], [prompt], Sampling(10, temperature=0))[0]
        wanted = models[adapter](torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        for piece, row in zip(pieces, wanted, strict=True):
            assert piece.logprob == pytest.approx(row[piece.token].item(), abs=1e-4)
        texts.add((prompt[0], *new))
    assert len(texts) > 6
    assert generate_ids(model, [common], Sampling(9, temperature=0)) == generate_ids(
        decoder(**keys), [common], Sampling(9, temperature=0)
    )


def test_adapters_share_no_cached_keys():
    model, prompt = decoder(), list(range(40))
    first, second = random_deltas(model, EVERY, 2, 1), random_deltas(model, EVERY, 2, 2)
    engine, settings = Engine(model), Sampling(6, temperature=0)

    def ask(adapter=None):
        before = engine.computed_tokens
        return [piece.token for piece in engine.submit(prompt, settings, adapter=adapter)], (
            engine.computed_tokens - before
        )

    engine.add_adapter("one", first)
    wanted = generate_ids(merged(model, first), [prompt], settings)[0]
    assert ask() == (generate_ids(model, [prompt], settings)[0], 45)
    assert ask("one") == (wanted, 45)
    assert ask("one") == (wanted, 45 - 32)
    engine.remove_adapter("one")
    engine.add_adapter("one", second)  # the same name, but another adapter
    assert ask("one") == (generate_ids(merged(model, second), [prompt], settings)[0], 45)


def test_adapters_of_a_transformers_model():
    theirs, _ = pair("Llama", "as is")

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = theirs

        def forward(self, tokens):
            return self.inner(tokens).logits

    model = Wrapped().eval()
    deltas, settings, prompts = (
        random_deltas(model, ("q_proj", "down_proj"), 3, 7),
        Sampling(8, temperature=0),
        [[1, 2], [4]],
    )
    engine = Engine(model)
    engine.add_adapter("a", deltas)
    streams = [engine.submit(prompt, settings, adapter=name) for prompt in prompts for name in (None, "a")]
    got = [[piece.token for piece in stream] for stream in streams]
    assert got[::2] == generate_ids(model, prompts, settings)
    assert got[1::2] == generate_ids(merged(model, deltas), prompts, settings)


def test_mistakes_are_one_line():
    model, a, b = decoder(), torch.zeros(2, 16), torch.zeros(16, 2)
    engine, layer = Engine(model), "layers.0.attention.q_proj"
    engine.add_adapter("good", {layer + ".weight": (a, b)})
    for name, deltas, words in (
        ("good", {layer: (a, b)}, "remove it first"),
        ("x", {}, "no deltas"),
        ("x", {"layers.0.attention.q_prj": (a, b)}, "did you mean 'layers.0.attention.q_proj'"),
        ("x", {"lm_head": (a, b)}, "not a linear layer"),
        ("x", {layer: (b, a)}, r"16 inputs and 16 outputs, but A is \[16, 2\]"),
        ("x", {layer: (a, torch.zeros(16, 3))}, r"B is \[16, 3\]"),
        ("x", {layer: LowRank(a, b, 1.0, torch.ones(3))}, r"magnitude .* is \[3\]; it must be \[16\]"),
    ):
        with pytest.raises(UserError, match=words):
            engine.add_adapter(name, deltas)
    with pytest.raises(UserError, match="no adapter 'x'; use one of 'good'"):
        engine.submit([1], Sampling(2), adapter="x")
    stream = engine.submit([1], Sampling(2, n=2), adapter="good")
    with pytest.raises(UserError, match="'good' is used by 2 unfinished"):
        engine.remove_adapter("good")
    list(stream)
    engine.remove_adapter("good")
    with pytest.raises(UserError, match="no adapter 'good'"):
        engine.submit([1], Sampling(2), adapter="good")


def test_a_layer_that_the_model_does_not_call():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.used, self.unused = nn.Embedding(9, 4), nn.Linear(4, 9), nn.Linear(4, 9)

        def forward(self, tokens):
            return self.used(self.embedding(tokens))

    engine = Engine(Half())
    engine.add_adapter("a", {"unused": (torch.ones(1, 4), torch.ones(9, 1))})
    with pytest.raises(UserError, match="does not call"):
        list(engine.submit([1], Sampling(2), adapter="a"))
