"""The cache against transformers: windows, latents, sinks, slopes, experts; long texts, unequal prompts, pieces."""

import pytest
import torch
from test_families import pair, texts

from weft.config.model import ModelSection
from weft.generation import sample
from weft.generation.cache import KVCache, sliding_windows
from weft.generation.sample import Sampling, generate_steps
from weft.models.build import build_model
from weft.models.initialize import initialize

# Windows are of 7 tokens.
FAMILIES = [
    ("Mistral", "window"),
    ("Gemma2", "as is"),
    ("Gemma3Text", "as is"),
    ("Gemma3Text", "stretched, capped"),
    ("GptOss", "as is"),
    ("DeepseekV3", "as is"),
    ("Mpt", "as is"),
    ("Mixtral", "one expert each, window"),
]
every = pytest.mark.parametrize(("family", "shape"), FAMILIES, ids=[" ".join(case) for case in FAMILIES])
PROMPTS = [texts(length, seed=length).tolist() for length in (19, 1, 5, 12)]


def expected(theirs, prompts, **settings):
    """What transformers appends to each prompt, padding behind a row's end included."""
    widest = max(map(len, prompts))
    padded = torch.tensor([[0] * (widest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts])
    out = theirs.generate(padded, attention_mask=mask, do_sample=False, pad_token_id=0, **settings)
    return out[:, widest:].tolist()


def greedy(ours, prompts, max_new_tokens, **settings):
    """What each prompt gets; None behind its end."""
    steps = generate_steps(ours, prompts, Sampling(max_new_tokens, temperature=0.0), **settings)
    return [list(row) for row in zip(*steps, strict=True)]


@every
def test_long_after_the_window_has_passed(family, shape, monkeypatch):
    theirs, ours = pair(family, shape)
    wanted = expected(theirs, PROMPTS, max_new_tokens=40)
    assert greedy(ours, PROMPTS, max_new_tokens=40) == wanted
    assert greedy(ours, PROMPTS, max_new_tokens=40, cache=False) == wanted
    monkeypatch.setattr(sample, "CHUNK", 4 * len(PROMPTS))  # the prompts go in by four tokens
    assert greedy(ours, PROMPTS, max_new_tokens=40) == wanted


@every
@torch.no_grad()
def test_logits_of_a_text_in_pieces(family, shape):
    """Pieces that fit the buffer, that fill it to the last slot, that are longer than it; one by one between them."""
    theirs, ours = pair(family, shape)
    tokens = texts(2, 60)
    wanted = theirs(tokens).logits
    for pieces in ([1] * 60, [7, 1, 8, 1, 1, 1, 20, 2, 19], [30, 6, 6, 6, 1, 1, 10], [60]):
        cache, got = KVCache(60, windows=sliding_windows(ours)), []
        for piece in tokens.split(pieces, dim=1):
            got.append(ours(piece, cache=cache))
        assert (torch.cat(got, 1) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    with pytest.raises(ValueError, match="60 tokens is too small for 61"):
        ours(tokens[:, :1], cache=cache)


@pytest.mark.parametrize("window", [1, 2, 3, 9])
@torch.no_grad()
def test_slopes_in_a_window(window):
    """Slopes go by distances: what is kept of the text must stay in order."""
    section = ModelSection(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        position="alibi", sliding_window=window, sliding_window_pattern=3, initializer_range=0.3,
    )  # fmt: skip
    model = build_model(section).to(torch.float64)
    initialize(model, 1)
    model.eval()
    tokens = torch.randint(0, 50, (2, 30))
    cache = KVCache(30, windows=sliding_windows(model))
    got = [model(piece, cache=cache) for piece in tokens.split([2, 1, 1, 5, 1, 1, 1, 1, 12, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(got, 1), model(tokens))
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [13, 14]]
    assert greedy(model, prompts, max_new_tokens=20) == greedy(model, prompts, max_new_tokens=20, cache=False)


def test_a_layer_with_a_window_holds_little_more_than_it(monkeypatch):
    """200 tokens, a window of 16: 20 slots for it."""
    made = []

    class Watched(KVCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(sample, "KVCache", Watched)
    shape = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    small = {"num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    for window, slots in (({}, 4 * 202), ({"sliding_window": 16}, 4 * 20), ({"sliding_window_pattern": 4}, 262)):
        window = {"sliding_window": 16} | window if window else window
        model = build_model(ModelSection(**shape, **small, **window))
        initialize(model, 0)
        list(generate_steps(model, [[1, 2, 3], [4]], Sampling(200, temperature=0.0)))
        # Batch 2, 2 heads of 8 numbers, keys and values, 4 bytes each.
        assert made[-1].nbytes == slots * 2 * 2 * 8 * 2 * 4


def test_latent_attention_holds_the_latents_alone():
    _, ours = pair("DeepseekV3", "as is")
    cache = KVCache(50, windows=sliding_windows(ours))
    with torch.no_grad():
        ours(texts(3, 5), cache=cache)
    assert cache.nbytes == 4 * 3 * 50 * (16 + 8) * 4  # layers, batch, slots, kv_lora_rank + qk_rope_head_dim, bytes


@pytest.mark.parametrize(("family", "shape"), [("Mistral", "window"), ("DeepseekV3", "as is")])
def test_rows_end_by_themselves(family, shape):
    theirs, ours = pair(family, shape)
    free = greedy(ours, PROMPTS, max_new_tokens=30)
    stops = {free[0][3], free[1][9], free[3][14]}
    wanted = expected(theirs, PROMPTS, max_new_tokens=30, eos_token_id=sorted(stops))
    got = greedy(ours, PROMPTS, max_new_tokens=30, stop_ids=stops)
    assert len({row.index(None) for row in got if None in row}) > 1
    assert [[0 if token is None else token for token in row] for row in got] == wanted


@every
def test_one_token_of_one_token(family, shape):
    theirs, ours = pair(family, shape)
    for prompts, new in (([[5]], 1), ([[5]], 12), ([[5], [6, 7, 8]], 1)):
        assert greedy(ours, prompts, max_new_tokens=new) == expected(theirs, prompts, max_new_tokens=new)
