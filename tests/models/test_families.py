"""Every family against transformers' own class: keys, names, logits, gradients, losses and generation.

A new family is one line of `ROWS`.
"""

from functools import cache

import pytest
import torch
import transformers
from hf_reference import convert
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from weft.config.huggingface_config import model_keys
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.families import family_of
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models import huggingface_weights as huggingface
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
NEW = 8  # tokens to generate: more than a window holds


def scaled(kind, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **keys}}


def longrope(original, rotations, **keys):
    factors = {kind: [1 + 0.3 * n * (n + by) for n in range(rotations)] for kind, by in FACTORS.items()}
    return scaled("longrope", **factors, **keys) | {"original_max_position_embeddings": original}


FACTORS = {"short_factor": 0, "long_factor": 4}
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

MOE = {**SHAPE, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
DEEPSEEK = {
    **ONE_GROUP, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}  # fmt: skip
MPT = {
    "vocab_size": 101, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip

# The configuration's class, and the shapes to try, each with a name.
ROWS = {
    "Llama": {
        "as is": ONE_GROUP,
        "biases, own head size, tied": {**SHAPE, **TIED, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
        "llama3": {**SHAPE, **LLAMA3},
        "linear": {**SHAPE, **scaled("linear", factor=3.0)},
        # Sequences beyond the first context: `test_rope.py`.
        "dynamic": {**SHAPE, **scaled("dynamic", factor=2.0)},
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
        "longrope": {**ONE_GROUP, **longrope(32, 4)},
        "longrope, all long, tied, half rotated": {**SHAPE, **TIED, **longrope(2, 2, partial_rotary_factor=0.5)},
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
    "Mpt": {
        "as is": MPT,
        "eight heads, clipped, scaled, untied": {
            **MPT, "n_heads": 8, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}, "tie_word_embeddings": False
        },
    },
    "Mixtral": {
        "as is": {**MOE, "num_local_experts": 4},
        "one expert each, window": {**MOE, **SLIDING, "num_local_experts": 3, "num_experts_per_tok": 1},
    },
    "Qwen3Moe": {
        "as is": {**MOE, "num_experts": 6, "moe_intermediate_size": 20, "head_dim": 14},
        "some layers, tied, weights of sum 1": {
            **MOE, **TIED, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8,
            "mlp_only_layers": [0], "decoder_sparse_step": 2,
        },
    },
    "Olmoe": {
        "as is": {**MOE, "num_experts": 5, "num_key_value_heads": 6},
        "clipped, weights of sum 1": {**MOE, "num_experts": 4, "clip_qkv": 0.8, "norm_topk_prob": True},
    },
    "DeepseekV2": {
        "as is": DEEPSEEK,
        "groups, queries as they are, yarn": {
            **DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
            "routed_scaling_factor": 1.7, "n_shared_experts": 2,
            **scaled("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7),
        },
    },
    "DeepseekV3": {
        "as is": {**DEEPSEEK, "n_group": 2, "topk_group": 1},
        "one group, halves rotated, yarn": {
            **DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_interleave": False, "norm_topk_prob": False,
            **scaled("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0),
        },
    },
    "GptOss": {
        "as is": {**MOE, **SLIDING, "num_local_experts": 4, "head_dim": 8, "swiglu_limit": 1.5},
        "no window, no stretching": {
            **MOE, **scaled("default"), "num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 4
        },
    },
}  # fmt: skip
CASES = [(family, shape) for family, shapes in ROWS.items() for shape in shapes]
every = pytest.mark.parametrize(("family", "shape"), CASES, ids=[" ".join(case) for case in CASES])


@cache
def pair(family, shape):
    """transformers' model with random weights, and ours with the same."""
    return build_pair(family, ROWS[family][shape])


MAIN = {"num_nextn_predict_layers": 0}  # transformers has none, whatever its configuration says


def build_pair(family, keys):
    config = getattr(transformers, f"{family}Config")(**keys, attn_implementation="eager")
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *saved_buffers(theirs).values()):
            tensor.copy_(torch.randn_like(tensor) * 0.2)
    section = ModelSection(**model_keys({**config.to_dict(), "architectures": [type(theirs).__name__], **MAIN}))
    ours = build_model(section).eval()
    ours.load_state_dict(convert(section, on_disk(theirs)))
    return theirs, ours


def saved_buffers(model):
    known = dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in known}


def on_disk(model, tensors=None):
    """A model's tensors, or others under their names, by the names in files: transformers has its own in memory."""
    whole = dict(model.named_parameters()) | saved_buffers(model) if tensors is None else tensors
    return revert_weight_conversion(model, {name: tensor.detach() for name, tensor in whole.items()})


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
    kept = torch.tensor([0, tokens.shape[1] - 1])
    near(ours(tokens, logits_to_keep=kept), expected.logits[:, kept], 1e-5)
    expected.loss.backward()
    (-ours(tokens[:, :-1], labels=tokens[:, 1:]).mean()).backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()} | saved_buffers(theirs)
    wanted = convert(ours.config, on_disk(theirs, wanted))
    for name, parameter in ours.named_parameters():
        near(parameter.grad, wanted[name], 1e-4)
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
    expected = theirs.generate(padded, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    expected = expected[:, widest:].tolist()
    for cache_ in (True, False):
        assert generate_ids(ours, prompts, Sampling(NEW, temperature=0.0), cache=cache_) == expected


@every
@torch.no_grad()
def test_configuration_and_tensors_come_back(family, shape, tmp_path):
    theirs, ours = pair(family, shape)
    written = huggingface.to_config_json(ours.config)
    again = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written), attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    groups, tensors = {}, huggingface.saved_tensors(ours)
    for name, there, how in huggingface.tensor_mapping(ours.config):
        part = tensors[name] if how is None or how.expert is None else tensors[name][how.expert]
        groups.setdefault(there, (how, []))[1].append(part)
    state = {there: huggingface.invert(how, parts) for there, (how, parts) in groups.items()}
    original = on_disk(theirs)
    assert original.keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in original.items())
    again.config.save_pretrained(tmp_path)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = texts(2, 40)
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize(
    ("family", "shape"), [case for case in CASES if "num_experts_per_tok" in ROWS[case[0]][case[1]]]
)
@torch.no_grad()
def test_routing(family, shape):
    """The same experts for the same tokens, and as many tokens for each expert."""
    theirs, ours = pair(family, shape)
    expected, chosen, tokens = [], [], texts(4, 33)
    hooks = [
        module.register_forward_hook(lambda module, inputs, outputs: expected.append(outputs[2]))
        for name, module in theirs.named_modules()
        if name.endswith((".gate", ".router"))
    ]
    hooks += [
        module.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[1].flatten(0, 1)))
        for name, module in ours.named_modules()
        if name.endswith(".router")
    ]
    theirs(tokens)
    ours.train()(tokens, loss_weights=torch.tensor([0.5, 0.0, 0.3, 0.2]))
    ours.eval(), [hook.remove() for hook in hooks]
    assert len(chosen) == len(expected) > 0
    for mine, other in zip(chosen, expected, strict=True):
        assert torch.equal(mine.sort(-1).values, other.sort(-1).values)
    for router, other in zip([m for n, m in ours.named_modules() if n.endswith(".router")], expected, strict=True):
        counted = torch.cat((other[:33], other[66:]))  # the second row has no part in the loss
        assert router.load.tolist() == torch.bincount(counted.flatten(), minlength=len(router.load)).tolist()
        router.load.zero_()


@every
def test_size_by_formula_is_that_of_the_model(family, shape):
    """Of experts, a token goes through so many of those that there are."""
    _, ours = pair(family, shape)
    size = ours.config.size()
    assert size.parameters == sum(parameter.numel() for parameter in ours.parameters())
    used = 0 if ours.lm_head is not None else ours.embed_tokens.weight.numel()
    for name, parameter in ours.named_parameters():
        if ".experts." in name and parameter.dim() == 3:
            used += parameter[: ours.config.moe.num_experts_per_tok].numel()
        elif parameter.dim() == 2 and "embed" not in name and ".experts." not in name:
            used += parameter.numel()
    assert size.matmul == used


def test_older_spellings_of_rotations():
    keys = {**SHAPE, "architectures": ["LlamaForCausalLM"], "rope_theta": 5000, "rms_norm_eps": 1e-6}
    section = ModelSection(**model_keys({**keys, "rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert (section.rope_theta, section.rope_scaling.factor) == (5000.0, 2.0)
    section = ModelSection(**model_keys({**keys, "rope_scaling": {"type": "dynamic", "factor": 2.0}}))
    assert section.rope_scaling.original_max_position_embeddings == 128
    with pytest.raises(UserError, match="rope_scaling: rope_type 'mrope' is not supported; use one of linear, llama3"):
        model_keys({**keys, "rope_scaling": {"type": "mrope", "factor": 2.0}})
    gemma = {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "rope_theta": 9000.0, "rope_local_base_freq": 800.0}
    section = ModelSection(**model_keys(gemma))
    assert (section.rope_theta, section.rope_local_base_freq) == (9000.0, 800.0)


def test_what_a_family_cannot_say_is_reported():
    shape = {key: value for key, value in SHAPE.items() if "token" not in key}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(UserError, match=r"model\.moe\.moe_intermediate_size is 32, .* 100;"):
        huggingface.to_config_json(ModelSection(**shape, family="mixtral", moe=moe))
    section = ModelSection(**{k: v for k, v in SHAPE.items() if "token" not in k}, qk_norm=True)
    with pytest.raises(UserError, match=r"model\.qk_norm is True"):
        huggingface.to_config_json(section)
    with pytest.raises(UserError, match=r"'LlamaForCasualLM'.* is LlamaForCausalLM "):
        family_of({"architectures": ["LlamaForCasualLM"]})
    with pytest.raises(UserError, match=r"hidden_act: .*'mish'.* silu"):
        model_keys({**SHAPE, "architectures": ["LlamaForCausalLM"], "hidden_act": "mish"})
    with pytest.raises(UserError, match="hidden_size: missing"):
        model_keys({"architectures": ["LlamaForCausalLM"], "vocab_size": 5})


@pytest.mark.parametrize("pad", [3, -2])
@pytest.mark.parametrize(("family", "tied"), [("Llama", False), ("Llama", True), ("Gemma2", True), ("Phi3", False)])
def test_the_padding_row_gets_the_gradient_that_transformers_gives_it(family, tied, pad):
    keys = GEMMA if family == "Gemma2" else SHAPE
    theirs, ours = build_pair(family, keys | {"pad_token_id": pad, "tie_word_embeddings": tied, "vocab_size": 101})
    row = pad % 101
    assert ours.config.pad_token_id == row
    tokens = texts(2, 40)
    tokens[:, ::7] = row
    theirs(tokens, labels=tokens).loss.backward()
    (-ours(tokens[:, :-1], labels=tokens[:, 1:]).mean()).backward()
    wanted = theirs.get_input_embeddings().weight.grad
    near(ours.embed_tokens.weight.grad, wanted, 1e-4)
    assert bool(ours.embed_tokens.weight.grad[row].any()) == tied  # a tied head still trains it
    assert huggingface.to_config_json(ours.config)["pad_token_id"] == row


@pytest.mark.parametrize(
    ("family", "stated", "row"),
    [
        ("Llama", {}, None), ("Olmo2", {}, 1), ("Gemma2", {}, 0), ("Gemma2", {"pad_token_id": None}, None),
        ("SmolLM3", {}, None), ("Llama", {"pad_token_id": 101}, None), ("GPTNeoX", {"pad_token_id": 3}, None),
    ],
)  # fmt: skip
def test_a_padding_row_that_config_json_leaves_out_or_that_is_not_there(family, stated, row):
    keys = {key: value for key, value in SHAPE.items() if key != "pad_token_id"} | stated
    section = ModelSection(**model_keys(keys | {"architectures": [f"{family}ForCausalLM"]}))
    assert section.pad_token_id == row
    with pytest.raises(UserError, match=r"model\.pad_token_id is 5"):
        huggingface.to_config_json(section.model_copy(update={"pad_token_id": 5, "family": "gpt_neox"}))
