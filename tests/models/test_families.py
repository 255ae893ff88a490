"""Every family against transformers' own class: keys, names, logits, gradients, losses and generation.

A new family is one line of `ROWS`.
"""

from functools import cache

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from weft.config.errors import UserError
from weft.config.model import ModelSection
from weft.generate.sample import generate
from weft.models import huggingface
from weft.models.build import build_model

SHAPE = {
    "vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 100, "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
ONE_GROUP = {**SHAPE, "num_key_value_heads": 6}
GPT2 = {
    "vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
NEOX = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
TIED = {"tie_word_embeddings": True}
SLIDING = {"sliding_window": 7}


def scaled(kind, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **keys}}


LLAMA3 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=32)
MULTIPLIERS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip
GEMMA = {**SHAPE, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 20}
NESTED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
    }
}

# The configuration's class, and the shapes to try, each with a name.
ROWS = {
    "Llama": {
        "as is": ONE_GROUP,
        "biases, own head size, tied": {**SHAPE, **TIED, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
        "llama3": {**SHAPE, **LLAMA3},
        "linear": {**SHAPE, **scaled("linear", factor=3.0)},
        "yarn": {**SHAPE, **YARN},
        "yarn, all keys": {
            **SHAPE,
            **scaled("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.2, mscale_all_dim=0.8,
                     beta_fast=20.0, beta_slow=2.0, truncate=False),
        },
    },
    "GPT2": {"as is": GPT2, "untied, own MLP": {**GPT2, "tie_word_embeddings": False, "n_inner": 100}},
    "Qwen2": {
        "as is": SHAPE,
        "tied, window": {**SHAPE, **TIED, **SLIDING, "use_sliding_window": True, "max_window_layers": 2},
    },
    "Qwen3": {
        "as is": {**SHAPE, "head_dim": 14},
        "tied, yarn, window": {
            **SHAPE, **TIED, **YARN, **SLIDING, "head_dim": 8, "use_sliding_window": True, "max_window_layers": 1
        },
    },
    "Mistral": {"window": {**SHAPE, **SLIDING}, "none, tied": {**ONE_GROUP, **TIED, "sliding_window": None}},
    "Olmo2": {"as is": ONE_GROUP, "grouped, tied": {**SHAPE, **TIED, **LLAMA3}},
    "Phi3": {
        "as is": ONE_GROUP,
        "grouped, window, half rotated": {**SHAPE, **SLIDING, **scaled("default", partial_rotary_factor=0.5)},
    },
    "SmolLM3": {
        "as is": SHAPE,
        "own layers, window": {
            **SHAPE, **SLIDING, "use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False
        },
    },
    "Granite": {"as is": {**SHAPE, **MULTIPLIERS}, "tied, biases": {**SHAPE, **MULTIPLIERS, **TIED, "mlp_bias": True}},
    "Starcoder2": {
        "as is": SHAPE,
        "window, no biases": {**SHAPE, **SLIDING, "use_bias": False, "tie_word_embeddings": False},
    },
    "Gemma2": {
        "as is": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
        "nothing capped": {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "Gemma3Text": {
        "as is": {**GEMMA, "sliding_window_pattern": 3},
        "stretched, capped": {**GEMMA, **NESTED, "final_logit_softcapping": 3.0},
    },
    "GPTNeoX": {
        "as is": {**NEOX, **scaled("default", partial_rotary_factor=0.25)},
        "one after the other": {
            **NEOX, **scaled("default", partial_rotary_factor=0.5), "use_parallel_residual": False,
            "attention_bias": False,
        },
    },
}  # fmt: skip
CASES = [(family, shape) for family, shapes in ROWS.items() for shape in shapes]
every = pytest.mark.parametrize(("family", "shape"), CASES, ids=[" ".join(case) for case in CASES])


@cache
def pair(family, shape):
    """transformers' model with random weights, and ours with the same."""
    config = getattr(transformers, f"{family}Config")(**ROWS[family][shape], attn_implementation="eager")
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    section = ModelSection(**huggingface.section_of({**config.to_dict(), "architectures": [type(theirs).__name__]}))
    ours = build_model(section).eval()
    state = on_disk(theirs)
    names = {ours: huggingface.apply(how, state[name]) for ours, name, how in huggingface.names(section)}
    ours.load_state_dict(names)
    return theirs, ours


def on_disk(model):
    """Parameters by their names in files: transformers renames GPT-NeoX's head when it loads it."""
    head = "embed_out" if isinstance(model, transformers.GPTNeoXForCausalLM) else "lm_head"
    return {name.replace("lm_head", head): parameter for name, parameter in model.named_parameters()}


def texts(*shape, seed=0):
    return torch.randint(0, 101, shape, generator=torch.Generator().manual_seed(seed))


def near(ours, theirs, bound):
    assert (ours - theirs).abs().max() <= bound * max(1.0, theirs.abs().max().item())


@every
def test_logits_and_gradients(family, shape):
    theirs, ours = pair(family, shape)
    tokens = texts(3, 41)
    expected = theirs(tokens, labels=tokens)
    near(ours(tokens), expected.logits, 1e-5)
    expected.loss.backward()
    (-ours(tokens[:, :-1], labels=tokens[:, 1:]).mean()).backward()
    wanted = {name: parameter.grad for name, parameter in on_disk(theirs).items()}
    parameters = dict(ours.named_parameters())
    for name, there, how in huggingface.names(ours.config):
        near(parameters[name].grad, huggingface.apply(how, wanted[there]), 1e-4)
    theirs.zero_grad(), ours.zero_grad()


@every
@torch.no_grad()
def test_loss_over_padded_and_packed_batches(family, shape):
    theirs, ours = pair(family, shape)
    documents = [texts(1, length, seed=length) for length in (19, 4, 12)]
    alone = [torch.log_softmax(theirs(d).logits[:, :-1], -1).gather(2, d[:, 1:, None])[0, :, 0] for d in documents]
    longest = max(d.shape[1] for d in documents)
    padded, mask = torch.zeros(3, longest, dtype=torch.int64), torch.zeros(3, longest, dtype=torch.int64)
    for row, document in enumerate(documents):
        padded[row, : document.shape[1]], mask[row, : document.shape[1]] = document[0], 1
    expected = theirs(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100)).loss
    logprobs = ours(padded[:, :-1], labels=padded[:, 1:])[mask[:, 1:] == 1]
    near(-logprobs.mean(), expected, 1e-5)
    near(logprobs, torch.cat(alone), 2e-5)
    packed = torch.cat(documents, 1)
    segments = torch.cat([torch.full_like(d, number) for number, d in enumerate(documents)], 1)
    positions = torch.cat([torch.arange(d.shape[1])[None] for d in documents], 1)
    logprobs = ours(packed, positions, segments, labels=packed.roll(-1, 1))[0]
    inside = (segments == segments.roll(-1, 1))[0]
    near(logprobs[inside], torch.cat(alone), 2e-5)


@every
def test_greedy_generation_with_and_without_a_cache(family, shape):
    theirs, ours = pair(family, shape)
    prompts = [texts(length, seed=length).tolist() for length in (11, 3, 8)]
    widest = max(map(len, prompts))
    padded = torch.tensor([[0] * (widest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts])
    expected = theirs.generate(padded, attention_mask=mask, max_new_tokens=14, do_sample=False, pad_token_id=0)
    expected = expected[:, widest:].T.tolist()
    for cache_ in (True, False):
        assert list(generate(ours, prompts, max_new_tokens=14, temperature=0.0, cache=cache_)) == expected


@every
@torch.no_grad()
def test_configuration_and_tensors_come_back(family, shape):
    theirs, ours = pair(family, shape)
    written = huggingface.config_of(ours.config)
    again = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written), attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    groups = {}
    parameters = dict(ours.named_parameters())
    for name, there, how in huggingface.names(ours.config):
        groups.setdefault(there, (how, []))[1].append(parameters[name])
    state = {there: huggingface.invert(how, parts) for there, (how, parts) in groups.items()}
    original = on_disk(theirs)
    assert original.keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in original.items())
    for name, parameter in on_disk(again).items():
        parameter.copy_(state[name])
    tokens = texts(2, 40)
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_older_spellings_of_rotations():
    keys = {**SHAPE, "architectures": ["LlamaForCausalLM"], "rope_theta": 5000, "rms_norm_eps": 1e-6}
    section = ModelSection(**huggingface.section_of({**keys, "rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert (section.rope_theta, section.rope_scaling.factor) == (5000.0, 2.0)
    with pytest.raises(UserError, match="rope_scaling: rope_type 'dynamic'"):
        huggingface.section_of({**keys, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    gemma = {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "rope_theta": 9000.0, "rope_local_base_freq": 800.0}
    section = ModelSection(**huggingface.section_of(gemma))
    assert (section.rope_theta, section.rope_local_base_freq) == (9000.0, 800.0)


def test_what_a_family_cannot_say_is_told():
    section = ModelSection(**{k: v for k, v in SHAPE.items() if "token" not in k}, qk_norm=True)
    with pytest.raises(UserError, match=r"model\.qk_norm is True"):
        huggingface.config_of(section)
    with pytest.raises(UserError, match="did you mean 'LlamaForCausalLM'"):
        huggingface.family_of({"architectures": ["LlamaForCasualLM"]})
    with pytest.raises(UserError, match="hidden_act: no nonlinearity 'mish'"):
        huggingface.section_of({**SHAPE, "architectures": ["LlamaForCausalLM"], "hidden_act": "mish"})
    with pytest.raises(UserError, match="hidden_size: missing"):
        huggingface.section_of({"architectures": ["LlamaForCausalLM"], "vocab_size": 5})
