"""Decoding steps in compiled C: the logits of PyTorch, whatever the model, its dtype and the other sequences."""

import shutil

import pytest
import torch

from weft.config.model import ModelSection
from weft.errors import UserError
from weft.generation.engine import Engine
from weft.generation.runners import PagedRunner, Work
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models.build import build_model
from weft.models.initialize import initialize

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")

SHAPE = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
GPT2 = {"norm": "layernorm", "position": "learned", "mlp": "plain", "attention_bias": True, "mlp_bias": True}
GEMMA = {
    "norm": "rmsnorm1p",
    "norm_placement": "both",
    "sliding_window": 12,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 1000.0,
    "embedding_multiplier": 8.0,
    "attn_logit_softcapping": 20.0,
    "logit_softcap": 10.0,
    "hidden_act": "gelu_tanh",
    "tie_word_embeddings": True,
}
MULTIPLIERS = {"residual_multiplier": 0.3, "logits_scaling": 4.0, "attention_multiplier": 0.1, "hidden_act": "relu2"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": {},
    "all heads": {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 72},
    "odd sizes": {"hidden_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "qk_norm": True},
    "large heads": {"head_dim": 80, "hidden_act": "relu"},
    "gpt2": {**GPT2, "hidden_act": "gelu_tanh", "tie_word_embeddings": True},
    "alibi": {"norm": "layernorm", "position": "alibi", "mlp": "plain", "use_parallel_residual": True},
    "gemma": GEMMA,
    "olmo2": {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "width", "clip_qkv": 0.5},
    "multipliers": {**MULTIPLIERS, "attention_sinks": True, "partial_rotary_factor": 0.5, "no_rope_layer_interval": 2},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}},
    "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}, "hidden_act": "gelu"},
}
# Cached and new tokens of each sequence: within and at the borders of blocks, one and several.
SEQUENCES = [(5, 1), (40, 1), (17, 3), (31, 2), (3, 1), (100, 7)]


def build(dtype=torch.float32, **settings):
    model = build_model(ModelSection(**{**SHAPE, **settings})).eval()
    initialize(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases would have no effect
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def new_works():
    """Prompts and the tokens after them, with blocks in a random order."""
    generator = torch.Generator().manual_seed(1)
    free = torch.randperm(64, generator=generator).tolist()
    prompts, news = [], []
    for i, (cached, new) in enumerate(SEQUENCES):
        end = cached + new
        tokens = torch.randint(0, 211, (end,), generator=generator).tolist()
        blocks = [free.pop() for _ in range(-(-end // 16))]
        prompts.append(Work(i, tokens, 0, cached, cached, 1, blocks))
        news.append(Work(i, tokens, cached, end, cached, new, blocks))
    return prompts, news


def runner_after(prompts, model, compiled):
    runner = PagedRunner(model, compiled=compiled)
    runner.cache.grow(64)
    runner.forward(prompts)
    return runner


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.08)], ids=["fp32", "bf16"])
def test_logits_equal_those_of_pytorch(name, dtype, tolerance):
    model, (prompts, news) = build(dtype, **MODELS[name]), new_works()
    expected = runner_after(prompts, model, compiled=False).forward(news)
    runner = runner_after(prompts, model, compiled=True)
    found = runner.forward(news)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.std()
    # The other rows of the step make no difference.
    for work, together in zip(news, found, strict=True):
        assert torch.equal(runner.forward([work])[0], together)


def test_greedy_text_is_that_of_pytorch_also_after_training():
    model = build()
    prompts, sampling = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9], list(range(60))], Sampling(40, temperature=0)
    engine = Engine(model, compile=True)
    for _ in range(2):
        streams = [engine.submit(prompt, sampling) for prompt in prompts]
        found = [[piece.token for piece in stream] for stream in streams]
        assert found == generate_ids(model, prompts, sampling, compile=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        engine.clear()


def test_batch_invariant_text_is_the_same_alone():
    model, prompts = build(torch.bfloat16), [[1, 2, 3], [9] * 30, [7, 8]]
    sampling = Sampling(20, temperature=1.0, seed=1)
    together = generate_ids(model, prompts, sampling, compile=True, batch_invariant=True)
    alone = [generate_ids(model, [p], sampling, compile=True, batch_invariant=True)[0] for p in prompts]
    assert together == alone


def test_models_that_cannot_be_compiled_say_why():
    model = build(torch.float64)
    with pytest.raises(UserError, match=r"compile=True.*embed_tokens.weight is float64"):
        Engine(model, compile=True)
    engine = Engine(model)
    assert [piece.token for piece in engine.submit([1, 2], Sampling(3, temperature=0))]
    hooked = build()
    hooked.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match=r"layers\.1\.mlp has hooks"):
        Engine(hooked, compile=True)
    with pytest.raises(UserError, match="cache"):
        Engine(build(), cache=False, compile=True)
