"""`type: hf`: any causal language model of transformers, against what `from_pretrained` makes of the same files."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from weft.checkpoint.huggingface.transformers_files import fill_transformers_model, transformers_entries
from weft.checkpoint.tensors import model_tensors
from weft.config.transformers_model import TransformersModelSection, folder_config
from weft.errors import UserError
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models.roles import parameter_roles
from weft.models.transformers_model import build_transformers_model, materialize, missing_capability

WIDTH = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = WIDTH | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
OLDER = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
# What is special about each: a table of positions; a head with a bias; half of the head rotated, heads in parallel
# blocks; a factor of the logits; experts that lie otherwise in memory than in files; windows and a soft-cap; ALiBi;
# layers with a window by a mask of their own; a state in place of attention.
MODELS = {
    "OPT": ("OPTConfig", WIDTH | {"ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "GPTJ": ("GPTJConfig", OLDER),
    "CodeGen": ("CodeGenConfig", OLDER | {"n_ctx": 64}),
    "Phi": ("PhiConfig", WIDTH | {"intermediate_size": 64, "max_position_embeddings": 64}),
    "Falcon": ("FalconConfig", WIDTH | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "StableLm": ("StableLmConfig", GROUPED),
    "Cohere": ("CohereConfig", GROUPED),
    "Mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "Gemma2": ("Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "Bloom": ("BloomConfig", {"vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "GPTNeo": (
        "GPTNeoConfig",
        {"vocab_size": 101, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
        | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "Mamba": ("MambaConfig", {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}
MIXING = ("Bloom", "Mamba")  # cannot keep documents apart


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes a folder as `save_pretrained` does, of large random weights: `folder(name) -> path`."""
    made = {}

    def make(name):
        if name not in made:
            kind, keys = MODELS[name]
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(
                getattr(transformers, kind)(**keys, bos_token_id=0, eos_token_id=0, pad_token_id=0)
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            made[name] = tmp_path_factory.mktemp("hf") / name
            model.save_pretrained(made[name])
        return made[name]

    return make


def section_for(path, *, weights=True, **keys):
    return TransformersModelSection(
        type="hf", path=str(path), weights=weights, config=folder_config(str(path), {}, weights=weights), **keys
    )


def built(path, **keys):
    section = section_for(path, **keys)
    model = build_transformers_model(section)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, "cpu")
    fill_transformers_model(model, section)
    return model.eval()


@pytest.fixture(scope="module", params=MODELS)
def pair(request, folder):
    """A name, Weft's model and transformers' own of the same folder."""
    path = folder(request.param)
    return request.param, built(path), AutoModelForCausalLM.from_pretrained(path).eval()


TOKENS = torch.tensor(
    [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26], [27, 18, 28, 18, 28, 45, 90, 45, 23, 53, 60, 2]]
)


def test_it_is_transformers_own_model(pair):
    _, ours, theirs = pair
    there = theirs.state_dict()
    assert list(ours.state_dict()) == list(there)
    assert all(torch.equal(value, there[name]) for name, value in ours.state_dict().items())
    buffers = dict(theirs.named_buffers())  # rotations: no file holds them
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in ours.named_buffers())
    assert len(list(ours.parameters())) == len(list(theirs.parameters()))  # tied ones are one
    with torch.no_grad():
        logits = theirs(TOKENS).logits
        assert torch.equal(ours(TOKENS), logits)
        labels = TOKENS.roll(-1, 1)
        expected = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(ours(TOKENS, labels=labels), expected, rtol=0, atol=2e-5)
        divided = (logits / 0.7).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(ours(TOKENS, labels=labels, temperature=0.7), divided, rtol=0, atol=3e-5)
        torch.testing.assert_close(ours(TOKENS, temperature=0.7), logits / 0.7)


def test_gradients_are_those_of_the_plain_loss(pair):
    _, ours, theirs = pair
    labels = TOKENS.roll(-1, 1)
    ours.zero_grad()
    theirs.zero_grad()
    (-ours(TOKENS, labels=labels).mean()).backward()
    torch.nn.functional.cross_entropy(theirs(TOKENS).logits.flatten(0, 1), labels.flatten()).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, None) for name in MODELS), ("OPT", "eager"), ("Mixtral", "eager")]
)
def test_documents_are_what_they_are_one_by_one(folder, name, attention):
    model = built(folder(name), attn_implementation=attention)
    lacks = missing_capability(model, documents=True)
    if name in MIXING:
        assert "set data.document_attention to false and data.packing to concatenate" in lacks
        assert missing_capability(model, documents=False) is None
        return
    assert lacks is None
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 11])
    positions = torch.tensor([[*range(5), *range(7)], [0, *range(11)]])
    with torch.no_grad():
        together = model(TOKENS, positions=positions, segments=segments)
        for row, cut in ((0, 5), (1, 1)):
            apart = torch.cat([model(TOKENS[row : row + 1, :cut]), model(TOKENS[row : row + 1, cut:])], 1)
            torch.testing.assert_close(together[row : row + 1], apart, rtol=0, atol=2e-5)


def test_a_model_that_looks_ahead_is_reported(tmp_path):
    keys = WIDTH | {"intermediate_size": 48}
    AutoModelForCausalLM.from_config(transformers.BertConfig(**keys)).save_pretrained(tmp_path / "bert")
    assert "depend on later tokens" in missing_capability(built(tmp_path / "bert"), documents=False)


def test_it_writes_what_transformers_writes(pair):
    _, ours, theirs = pair
    prompts = [[3, 14, 15, 92, 65], [35, 89]]
    expected = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(prompt) :]
        for prompt in prompts
    ]
    for cache in (True, False):
        new = generate_ids(ours, prompts, Sampling(8, temperature=0), cache=cache)
        assert new == [ids.tolist() for ids in expected]


def test_what_would_be_saved_is_what_was_read(pair, folder):
    name, ours, _ = pair
    state = ours.state_dict()
    kinds = {first: tensor.dtype for first, (tensor, _) in model_tensors(ours).items()}
    entries = transformers_entries(section_for(folder(name)), kinds, state.__getitem__)
    there = load_file(folder(name) / "model.safetensors")
    assert sorted(entry.name for entry in entries) == sorted(there)
    for entry in entries:
        assert entry.shape == tuple(there[entry.name].shape)
        assert torch.equal(entry.read(), there[entry.name]), entry.name


def test_random_weights_are_those_of_its_class(folder):
    section = section_for(folder("StableLm"), weights=False)
    ours = build_transformers_model(section, seed=5)
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder("StableLm")))
    expected = theirs.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())


def test_weights_know_their_roles(folder):
    roles = parameter_roles(built(folder("StableLm")))
    assert roles["model.embed_tokens.weight"] == "embedding"
    assert roles["lm_head.weight"] == "head"
    assert roles["model.norm.weight"] == "norm"
    assert roles["model.layers.0.mlp.up_proj.weight"] == "matrix"


def changed(path, into, **keys):
    """A copy of a folder whose config.json says something else; None takes a key away."""
    into.mkdir()
    (into / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    config = json.loads((path / "config.json").read_text()) | keys
    (into / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return into


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_type": "optt"}, "'optt'.* did you mean 'opt'?"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "code.Own"}}, r"\'own\'.*auto_map"),
        ({"model_type": "vit"}, "causal language model.* 'vit'"),
        ({"num_attention_heads": 5}, "must be divisible by num_heads.*config.json"),
        (
            {"hidden_size": "wide"},
            "config.json: Validation error for field 'hidden_size': TypeError",
        ),
        ({"ffn_dim": 63}, r"layers.0.fc1.weight has shape \[64, 32\], but config.json .* \[63, 32\]"),
        ({"num_hidden_layers": 3}, "layers.2.self_attn.k_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "layers.1.fc1.bias does not belong to this model"),
        ({"model_type": None}, "model_type: missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\) and cannot be trained"),
    ],
)
def test_folders_that_cannot_be_had_are_reported_in_one_line(folder, tmp_path, keys, said):
    path = changed(folder("OPT"), tmp_path / "hf", **keys)
    with pytest.raises(UserError, match=said) as error:
        built(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_an_older_version_of_transformers_is_reported(folder, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(UserError, match=r"needs transformers 5 or newer, found 4\.57\.1; update transformers"):
        built(folder("OPT"))


def test_tied_weights_that_differ_in_the_files_are_reported(folder, tmp_path):
    path = changed(folder("StableLm"), tmp_path / "hf", tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"differ in the files; set model.config.tie_word_embeddings: false"):
        built(path)
