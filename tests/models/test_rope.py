"""Rotations that depend on how long a sequence is, against transformers' own, whole models and a cache."""

import warnings

import pytest
import torch
import transformers
from hf_reference import convert
from test_families import ONE_GROUP, SHAPE, near, on_disk, scaled, texts
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.config.huggingface_config import model_keys
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models import huggingface_weights as huggingface
from weft.models.build import build_model
from weft.models.layers.rope import rotary_cos_sin

GREEDY = Sampling(max_new_tokens=20, temperature=0.0)

FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 3.5, 6.0]}
LONGROPE = {
    **ONE_GROUP, "max_position_embeddings": 64,
    **scaled("longrope", **FACTORS, original_max_position_embeddings=16), "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC = {**SHAPE, "max_position_embeddings": 16, **scaled("dynamic", factor=3.0)}


def pair(family, keys):
    config = getattr(transformers, f"{family}Config")(**keys, attn_implementation="eager")
    torch.manual_seed(2)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.2)
    section = ModelSection(**model_keys({**config.to_dict(), "architectures": [type(theirs).__name__]}))
    ours = build_model(section).eval()
    ours.load_state_dict(convert(section, on_disk(theirs)))
    return theirs, ours


def greedy(theirs, prompt):
    mask = torch.ones_like(prompt)
    return theirs.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("length", [5, 16, 17, 61])
@pytest.mark.parametrize("keys", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_table(keys, length):
    """As transformers' functions say for a sequence of so many tokens."""
    config = transformers.LlamaConfig(**keys)
    kind = config.rope_parameters["rope_type"]
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    section = ModelSection(**model_keys({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    positions = torch.arange(length)[None]
    cos, sin = rotary_cos_sin(positions, 8, section.rope_theta, torch.float32, section.rope_scaling)
    angles = positions[..., None] * frequencies
    near(cos[:, 0], angles.cos() * factor, 1e-6)
    near(sin[:, 0], angles.sin() * factor, 1e-6)
    again = model_keys(huggingface.to_config_json(section))
    assert ModelSection(**again).rope_scaling == section.rope_scaling


@pytest.mark.parametrize("length", [9, 16, 17, 40])
@pytest.mark.parametrize("keys", [("Phi3", LONGROPE), ("Llama", LONGROPE), ("Llama", DYNAMIC)], ids=str)
@torch.no_grad()
def test_logits(keys, length):
    theirs, ours = pair(*keys)
    tokens = texts(2, length)
    near(ours(tokens), theirs(tokens).logits, 1e-5)


@torch.no_grad()
def test_a_row_gets_what_it_gets_alone():
    """Long and short rows in one batch; and of documents in one row, the longest decides."""
    _, ours = pair("Phi3", LONGROPE)
    short, long = texts(1, 30, seed=1), texts(1, 30, seed=2)
    positions = torch.stack((torch.arange(30) % 10, torch.arange(30)))
    segments = torch.stack((torch.arange(30) // 10, torch.zeros(30, dtype=torch.int64)))
    together = ours(torch.cat((short, long)), positions, segments)
    near(together[0, 10:20], ours(short[:, 10:20])[0], 1e-5)
    near(together[1], ours(long)[0], 1e-5)
    mixed = torch.cat((torch.arange(10), torch.arange(20)))[None]
    packed = ours(short, mixed, (torch.arange(30) >= 10).long()[None])
    near(packed[0, 10:], ours(short[:, 10:])[0], 1e-5)
    assert (packed[0, :10] - ours(short[:, :10])[0]).abs().max() > 1e-2


@pytest.mark.parametrize("cached", [True, False])
def test_generation_across_the_first_context(cached):
    """Phi-3 makes its keys again where the rotations become others; a dynamic model, with a cache, does not."""
    theirs, ours = pair("Phi3", LONGROPE)
    prompts = [texts(1, length, seed=length)[0].tolist() for length in (11, 7)]
    for prompt in prompts:
        expected = greedy(theirs, torch.tensor([prompt]))
        new = generate_ids(ours, [prompt], GREEDY, cache=cached)
        assert new == [expected[0, len(prompt) :].tolist()]
    together = generate_ids(ours, prompts, GREEDY, cache=cached)
    assert together == [generate_ids(ours, [prompt], GREEDY, cache=cached)[0] for prompt in prompts]


@pytest.mark.parametrize("keys", [("Phi3", LONGROPE), ("Llama", {**DYNAMIC, "max_position_embeddings": 24})], ids=str)
def test_chunks_of_a_prompt_are_rotated_by_the_length_of_the_prompt(keys):
    theirs, ours = pair(*keys)
    prompt = texts(1, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = generate_ids(ours, prompt.tolist(), GREEDY, max_step_tokens=8)
    assert new == greedy(theirs, prompt)[:, 30:].tolist()


def test_generation_with_a_base_that_grows():
    theirs, ours = pair("Llama", DYNAMIC)
    prompt = texts(1, 10)
    expected = greedy(theirs, prompt)
    assert generate_ids(ours, prompt.tolist(), GREEDY) == expected[:, 10:].tolist()


@pytest.mark.parametrize("keys", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_one_graph(keys):
    section = ModelSection(
        **model_keys(
            {**keys, "architectures": ["LlamaForCausalLM"]},
        )
    )

    def table(positions):
        return rotary_cos_sin(positions, 8, section.rope_theta, torch.float32, section.rope_scaling)

    torch._dynamo.reset()
    compiled = torch.compile(table, backend="eager", fullgraph=True)
    for length in (9, 30, 50):
        positions = torch.arange(length)[None]
        for one, other in zip(compiled(positions), table(positions), strict=True):
            assert torch.equal(one, other)
    torch._dynamo.reset()


def test_phi3_in_older_spellings():
    """`su`, and what is left to follow from the lengths, as in the published config.json files."""
    keys = {**ONE_GROUP, "architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    old = {**keys, "original_max_position_embeddings": 512, "rope_scaling": {"type": "su", **FACTORS}}
    scaling = ModelSection(**model_keys(old)).rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("longrope", 16.0, 512)
    written = huggingface.to_config_json(ModelSection(**model_keys(old)))
    assert written["rope_scaling"] == {"type": "longrope", **FACTORS}
    assert written["original_max_position_embeddings"] == 512
    with pytest.raises(UserError, match="'linear' is not supported for Phi-3"):
        model_keys({**keys, "rope_scaling": {"type": "linear", "factor": 2.0}})
    with pytest.raises(UserError, match="needs long_factor, a list of numbers"):
        model_keys({**keys, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}})
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1.0}, "sliding_attention": {}}
    with pytest.raises(UserError, match=r"^rope_parameters: .*layer type"):
        model_keys({**keys, "rope_parameters": nested})
    gemma = {**SHAPE, "architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 8, "sliding_window": 8}
    nested = {**nested, "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}}
    with pytest.raises(UserError, match=r"^rope_parameters: .*sliding_attention"):
        model_keys({**gemma, "rope_parameters": nested})
