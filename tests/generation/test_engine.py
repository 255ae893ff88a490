"""The engine: requests that come, go and share, against each request alone, a forward pass and transformers."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_families import pair
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from weft.config.model import ModelSection
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.generation.cache import BLOCK
from weft.generation.engine import Engine
from weft.generation.sampler import probabilities
from weft.generation.settings import Sampling
from weft.generation.stops import StopStrings
from weft.generation.text import generate_ids
from weft.models.build import build_model
from weft.models.initialize import initialize

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
KINDS = {
    "full": {},
    "window": {"sliding_window": 20},
    "both": {"sliding_window": 9, "sliding_window_pattern": 2},
    "alibi": {"position": "alibi"},
    "latent": {"mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}},
    "experts": {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
}
# "both" has a window, and layers without one.
SAMPLE = [
    "both",
    "latent",
    "experts",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("full", "window", "alibi")),
]


def decoder(**keys):
    model = build_model(ModelSection(**(SHAPE | keys)))
    initialize(model, 3)
    return model.eval()


def schedule(model, rng, alone, **speculation):
    """Runs requests that arrive and are cancelled at random steps; compares each with the same request alone."""
    options = speculation | {
        "max_batch": rng.choice([1, 3, 64]),
        "max_step_tokens": rng.choice([4, 17, 2048]),
        "max_cache_tokens": rng.choice([112, 200, 4096]),  # the longest request needs 96 + BLOCK
    }
    engine, waiting, streams = Engine(model, stop_ids={7}, **options), [], []
    common = [rng.randrange(60) for _ in range(40)]
    for _ in range(rng.randrange(2, 9)):
        prompt = common[: rng.choice([0, 16, 17, 33, 40])] + [rng.randrange(60) for _ in range(rng.randrange(1, 24))]
        settings = rng.choice(
            [{"temperature": 0.0}, {"temperature": 0.8, "seed": rng.randrange(3)}, {"temperature": 1.2, "top_p": 0.9}]
        )
        waiting.append((rng.randrange(12), rng.choice([None, None, 5]), prompt, settings, rng.randrange(1, 30)))
    step = 0
    while waiting or any(not stream.finished for *_, stream in streams):
        for request in [request for request in waiting if request[0] <= step]:
            waiting.remove(request)
            _, until, prompt, settings, new = request
            stream = engine.submit(prompt, Sampling(new, **settings))
            streams.append((None if until is None else step + until, prompt, settings, new, stream))
        for until, *_, stream in streams:
            if until is not None and until <= step:
                stream.cancel()
        engine.step()
        step += 1
    assert engine.blocks.free == len(engine.blocks)
    assert not engine.blocks.pending
    for until, prompt, settings, new, stream in streams:
        pieces = stream.ready()
        key = (tuple(prompt), tuple(settings.items()), new)
        if key not in alone:
            alone[key] = generate_ids(model, [prompt], Sampling(new, **settings), stop_ids={7}, **speculation)[0]
        got = [piece.token for piece in pieces if piece.token is not None]
        assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        if pieces[-1].finish == "cancelled":
            assert until is not None
            assert got == alone[key][: len(got)]
        else:
            assert got == alone[key]


def random_schedules(kind, count):
    model, rng, alone = decoder(**KINDS[kind]), random.Random(kind), {}
    for _ in range(count):
        schedule(model, rng, alone)


@pytest.mark.parametrize("kind", SAMPLE)
def test_random_schedules_give_each_request_what_it_gets_alone(kind):
    random_schedules(kind, 6)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_random_schedules(kind):
    random_schedules(kind, 170)


def test_common_beginnings_are_computed_once():
    model, common = decoder(), list(range(1, 50))
    engine = Engine(model)
    first = [engine.submit([*common, i], Sampling(1, temperature=0)) for i in range(5)]
    got = [[piece.token for piece in stream] for stream in first]
    assert engine.computed_tokens == 50 + 4 * (50 - 48)
    assert got == [generate_ids(model, [[*common, i]], Sampling(1, temperature=0))[0] for i in range(5)]
    again = engine.submit([*common, 0], Sampling(20, temperature=0))
    text = [piece.token for piece in again]
    assert engine.computed_tokens == 58 + 2 + 19
    # a conversation goes on: what was generated is shared too
    before = engine.computed_tokens
    list(engine.submit([*common, 0, *text, 9], Sampling(1, temperature=0)))
    assert engine.computed_tokens - before == 71 - 64
    engine.clear()
    list(engine.submit([*common, 0], Sampling(1, temperature=0)))
    assert engine.computed_tokens - before == 7 + 50


def test_several_continuations_of_a_prompt():
    model, prompt = decoder(), list(range(40))
    engine = Engine(model)
    texts = [[], [], []]
    for piece in engine.submit(prompt, Sampling(8, n=3, seed=4)):
        texts[piece.index].append(piece.token)
    assert texts == generate_ids(model, [prompt] * 3, Sampling(8, seed=4))
    assert len(set(map(tuple, texts))) == 3
    assert engine.computed_tokens == 40 + 2 * 8 + 3 * 7


def test_logprobs_are_those_of_a_forward_pass():
    model, prompt = decoder(), [5, 6, 7]
    pieces = list(Engine(model).submit(prompt, Sampling(9, temperature=0.7, top_k=9, logit_bias={3: 2.0}, logprobs=4)))
    tokens = [*prompt, *(piece.token for piece in pieces)]
    expected = model(torch.tensor([tokens]))[0].log_softmax(-1)[2:-1]
    for piece, row in zip(pieces, expected, strict=True):
        assert piece.logprob == pytest.approx(row[piece.token].item(), abs=1e-5)
        assert [token for token, _ in piece.top] == row.topk(4).indices.tolist()
        assert [value for _, value in piece.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
    assert next(Engine(model).submit(prompt, Sampling(1, logprobs=0))).top == ()


def test_the_repetition_penalty_is_that_of_transformers():
    theirs, ours = pair("Llama", "as is")
    prompt = [5, 6, 7, 8, 5]
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, repetition_penalty=1.7)
    assert generate_ids(ours, [prompt], Sampling(30, temperature=0, repetition_penalty=1.7)) == [
        expected[0, 5:].tolist()
    ]


@pytest.mark.parametrize("settings", [{"presence_penalty": 1.5}, {"frequency_penalty": 0.4}, {"logit_bias": {3: 3.0}}])
def test_penalties_and_bias_against_their_formulas(settings):
    model, tokens = decoder(), [1, 2, 3]
    new = generate_ids(model, [tokens], Sampling(25, temperature=0, **settings))[0]
    text = list(tokens)
    for token in new:
        logits = model(torch.tensor([text]))[0, -1].clone()
        for id in set(text[3:]):
            logits[id] -= settings.get("presence_penalty", 0)
            logits[id] -= settings.get("frequency_penalty", 0) * text[3:].count(id)
        for id, bias in settings.get("logit_bias", {}).items():
            logits[id] += bias
        assert token == logits.argmax().item()
        text.append(token)
    assert new != generate_ids(model, [tokens], Sampling(25, temperature=0))[0]


@pytest.mark.parametrize("top_k", [None, 7])
@pytest.mark.parametrize("top_p", [None, 0.7])
@pytest.mark.parametrize("min_p", [None, 0.2])
def test_probabilities_are_those_of_transformers(top_k, top_p, min_p):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 2
    ours = probabilities(logits, Sampling(1, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p))
    warped = TemperatureLogitsWarper(0.9)(None, logits)
    for value, warper in ((top_k, TopKLogitsWarper), (top_p, TopPLogitsWarper), (min_p, MinPLogitsWarper)):
        warped = warped if value is None else warper(value)(None, warped)
    torch.testing.assert_close(ours, warped.double().softmax(-1), atol=1e-6, rtol=1e-5)


def test_tokens_are_drawn_with_these_probabilities():
    model, settings = decoder(), {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02}
    counts = torch.zeros(60)
    for piece in Engine(model).submit([1, 2, 3], Sampling(1, n=4000, **settings)):
        counts[piece.token] += 1
    wanted = probabilities(model(torch.tensor([[1, 2, 3]]))[0, -1:], Sampling(1, **settings))[0] * 4000
    assert (counts[wanted == 0] == 0).all()
    seen = wanted > 5
    chi2 = ((counts - wanted).square() / wanted)[seen].sum().item()
    assert chi2 < 2 * seen.sum().item() + 20


def test_stop_strings_hold_back_only_what_can_begin_one():
    stops = StopStrings(("<|end|>", "</s", "aab"))
    assert [stops.feed(piece) for piece in ("x<", "|e", "<|", "en", "<", "/", "t", "aa", "a", "aac")] == [
        "x", "", "<|e", "", "<|en", "", "</t", "", "a", "aaaac",
    ]  # fmt: skip
    assert (stops.flush(), stops.found) == ("", None)
    rng = random.Random(5)
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(12)))
        names = ["".join(rng.choice("ab") for _ in range(rng.randrange(2, 6))) for _ in range(rng.randrange(1, 3))]
        stops, got, rest = StopStrings(names), "", text
        while rest and stops.found is None:
            size = rng.randrange(1, 4)
            got, rest = got + stops.feed(rest[:size]), rest[size:]
        ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(name) for name in names)]
        if stops.found is None:
            assert not ends
            assert got + stops.flush() == text
        else:
            # ended by the piece in which the first stop string is complete, before the earliest one in it
            assert ends
            assert any(text[len(got) :].startswith(name) for name in names)
            assert not any(name in got for name in names)


def test_a_text_ends_before_a_stop_string(tiny_tokenizer):
    tokenizer = Tokenizer.load(tiny_tokenizer)
    model = decoder(vocab_size=tokenizer.vocab_size)
    free = "".join(piece.text for piece in Engine(model, tokenizer).submit("Kalo", Sampling(30, temperature=0)))
    stop = free[9:12]
    pieces = list(Engine(model, tokenizer).submit("Kalo", Sampling(30, temperature=0, stop=(stop,))))
    assert "".join(piece.text for piece in pieces) == free[: free.index(stop)]
    assert pieces[-1].finish == "stop"


def test_memory_stays_flat_over_many_requests():
    engine, rng = Engine(decoder(num_hidden_layers=1), max_cache_tokens=640), random.Random(1)
    sizes = set()
    for _ in range(20):
        streams = [engine.submit([rng.randrange(60) for _ in range(30)], Sampling(2)) for _ in range(20)]
        for stream in streams:
            list(stream)
        sizes.add((len(engine.blocks), engine.runner.cache.nbytes))
    assert sizes == {(640 // BLOCK, engine.runner.cache.nbytes)}


def test_a_failing_forward_pass_ends_its_requests_only(monkeypatch):
    model = decoder()
    engine = Engine(model, max_batch=1)
    first, second = engine.submit([1, 2], Sampling(3)), engine.submit([3], Sampling(3, temperature=0))
    monkeypatch.setattr(engine.runner, "forward", lambda works: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        next(first)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="no memory"):
        next(first)
    assert [piece.token for piece in second] == generate_ids(model, [[3]], Sampling(3, temperature=0))[0]
    assert engine.blocks.free == len(engine.blocks)


def test_a_stream_is_cancelled_at_the_end_of_its_block():
    engine = Engine(decoder())
    with engine.submit([1, 2, 3], Sampling(100)) as stream:
        next(stream)
    assert engine.blocks.free == len(engine.blocks)
    assert not engine.step()
    assert list(stream)[-1].finish == "cancelled"


def test_threads_share_an_engine():
    model = decoder()
    engine, barrier = Engine(model), threading.Barrier(6)

    def ask(i):
        barrier.wait()
        return [piece.token for piece in engine.submit([1, 2, i], Sampling(20, temperature=0))]

    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(ask, range(6)))
    assert got == generate_ids(model, [[1, 2, i] for i in range(6)], Sampling(20, temperature=0))


def test_batch_invariant_logits_have_the_same_bits():
    model, settings = decoder().to(torch.bfloat16), Sampling(20, temperature=0, logprobs=3)

    def bits(prompts):
        engine = Engine(model, batch_invariant=True, max_step_tokens=16, max_cache_tokens=640)
        streams = [engine.submit(prompt, settings) for prompt in prompts]
        return [[(p.token, p.logprob, p.top) for p in stream] for stream in streams]

    prompts = [[i % 60 for i in range(first, first + length)] for first, length in ((0, 40), (3, 1), (0, 41), (9, 70))]
    assert bits(prompts) == [bits([prompt])[0] for prompt in prompts]
