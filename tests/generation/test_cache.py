"""The cache against transformers: windows, latents, sinks, slopes, experts; long texts, unequal prompts, pieces."""

import pytest
import torch
from test_families import pair, texts

from weft.config.model import ModelSection
from weft.generation.cache import BLOCK
from weft.generation.engine import Engine
from weft.generation.runners import PagedRunner, Work
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models.build import build_model
from weft.models.initialize import initialize

# Windows are of 7 tokens.
FAMILIES = [
    ("Gemma3Text", "as is"),
    ("Gemma3Text", "stretched, capped"),
    ("GptOss", "as is"),
    ("DeepseekV3", "as is"),
    ("Mpt", "as is"),
    ("Mixtral", "one expert each, window"),
]
LONG = [("Mistral", "window"), ("Gemma2", "as is")]  # their windows and caps are also those of others
every = pytest.mark.parametrize(
    ("family", "shape"),
    [
        *(pytest.param(*case, id=" ".join(case)) for case in FAMILIES),
        *(pytest.param(*case, id=" ".join(case), marks=pytest.mark.long) for case in LONG),
    ],
)
PROMPTS = [texts(length, seed=length).tolist() for length in (19, 1, 5, 12)]


def expected(theirs, prompts, **settings):
    """What transformers appends to each prompt, padding behind a row's end included."""
    widest = max(map(len, prompts))
    padded = torch.tensor([[0] * (widest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts])
    out = theirs.generate(padded, attention_mask=mask, do_sample=False, pad_token_id=0, **settings)
    return out[:, widest:].tolist()


def greedy(ours, prompts, max_new_tokens, **settings):
    return generate_ids(ours, prompts, Sampling(max_new_tokens, temperature=0.0), **settings)


def forward(runner, tokens, start, end):
    """The logits of a piece of each row, whose blocks lie between those of the other rows."""
    rows, blocks = len(tokens), -(-tokens.shape[1] // BLOCK)
    if runner.cache.blocks == 0:
        runner.cache.grow(rows * blocks)
    works = [
        Work(row, ids, start, end, 0, end - start, list(range(row, rows * blocks, rows)))
        for row, ids in enumerate(tokens.tolist())
    ]
    return torch.stack(runner.forward(works))


def in_pieces(model, tokens, pieces):
    """The logits of a text that the model gets in pieces of these lengths."""
    runner, ends = PagedRunner(model), torch.tensor(pieces).cumsum(0).tolist()
    return torch.cat([forward(runner, tokens, e - n, e) for n, e in zip(pieces, ends, strict=True)], dim=1)


@every
def test_long_after_the_window_has_passed(family, shape):
    theirs, ours = pair(family, shape)
    wanted = expected(theirs, PROMPTS, max_new_tokens=16)
    assert greedy(ours, PROMPTS, max_new_tokens=16) == wanted
    assert greedy(ours, PROMPTS, max_new_tokens=16, cache=False) == wanted
    assert greedy(ours, PROMPTS, max_new_tokens=16, max_step_tokens=5) == wanted
    assert greedy(ours, PROMPTS, max_new_tokens=16, max_cache_tokens=50) == wanted  # computed again when it is full
    assert greedy(ours, PROMPTS, max_new_tokens=16, batch_invariant=True) == wanted


@every
@torch.no_grad()
def test_logits_of_a_text_in_pieces(family, shape):
    theirs, ours = pair(family, shape)
    tokens = texts(2, 60)
    wanted = theirs(tokens).logits
    for pieces in ([1] * 60, [7, 1, 8, 1, 1, 1, 20, 2, 19], [30, 6, 6, 6, 1, 1, 10], [60]):
        assert (in_pieces(ours, tokens, pieces) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


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
    got = in_pieces(model, tokens, [2, 1, 1, 5, 1, 1, 1, 1, 12, 1, 4])
    torch.testing.assert_close(got, model(tokens))
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [13, 14]]
    assert greedy(model, prompts, max_new_tokens=20) == greedy(model, prompts, max_new_tokens=20, cache=False)


def test_a_window_in_all_layers_needs_no_more_blocks_than_the_window():
    shape = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    small = {"num_hidden_layers": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 16}
    model = build_model(ModelSection(**shape, **small))
    initialize(model, 0)
    engine = Engine(model, max_cache_tokens=1024)
    most = 0
    for _ in engine.submit([1, 2, 3], Sampling(200, temperature=0.0)):
        most = max(most, len(engine.blocks) - engine.blocks.free)
    assert 2 <= most <= 3
    # 64 blocks, 4 layers, 2 heads of 8 numbers, keys and values, 4 bytes each
    assert engine.runner.cache.nbytes == 64 * BLOCK * 4 * 2 * 8 * 2 * 4


def test_latent_attention_holds_the_latents_alone():
    _, ours = pair("DeepseekV3", "as is")
    runner = PagedRunner(ours)
    forward(runner, texts(3, 5), 0, 5)
    assert runner.cache.nbytes == 4 * 3 * BLOCK * (16 + 8) * 4  # layers, blocks, kv_lora_rank + qk_rope_head_dim, bytes


@pytest.mark.parametrize(("family", "shape"), [("Mistral", "window"), ("DeepseekV3", "as is")])
def test_rows_end_by_themselves(family, shape):
    theirs, ours = pair(family, shape)
    free = greedy(ours, PROMPTS, max_new_tokens=30)
    stops = {free[0][3], free[1][9], free[3][14]}
    wanted = expected(theirs, PROMPTS, max_new_tokens=30, eos_token_id=sorted(stops))
    got = greedy(ours, PROMPTS, max_new_tokens=30, stop_ids=stops)
    assert len({len(row) for row in got}) > 1
    width = max(map(len, wanted))
    assert [row + [0] * (width - len(row)) for row in got] == wanted


@every
def test_one_token_of_one_token(family, shape):
    theirs, ours = pair(family, shape)
    for prompts, new in (([[5]], 1), ([[5]], 12), ([[5], [6, 7, 8]], 1)):
        assert greedy(ours, prompts, max_new_tokens=new) == expected(theirs, prompts, max_new_tokens=new)
