"""What a config.json may say, and what becomes of it: transformers' meaning, or one line that names the key."""

import itertools
import json
import random
import re
import time
from contextlib import nullcontext as stay
from functools import cache
from types import SimpleNamespace

import pytest
import transformers
from test_families import NESTED, ROWS, longrope, scaled

from weft.checkpoint.huggingface.folder import section_of
from weft.config.huggingface_config import checked_model
from weft.errors import UserError
from weft.families import families, llama
from weft.families.mapping import keep_activation_names, renaming, same
from weft.models.huggingface_weights import to_config_json


@cache
def stated(family, shape=None):
    """The config.json of one of the shapes that the families are tested with, as transformers writes it."""
    config = getattr(transformers, f"{family}Config")(**ROWS[family][shape or next(iter(ROWS[family]))])
    architecture = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    return json.dumps(config.to_dict() | {"architectures": [architecture]}, default=str)


def of(family, shape=None, **changed):
    """A config.json with other keys; `...` takes one out."""
    whole = json.loads(stated(family, shape)) | changed
    return {key: value for key, value in whole.items() if value is not ...}


def theirs(config):
    """transformers' configuration for the same file, its rotations standardized as its models have them."""
    found = transformers.AutoConfig.for_model(**{k: v for k, v in config.items() if k != "architectures"})
    found.standardize_rope_params()
    return found


# ---- what transformers lets count


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "SmolLM3", "Mixtral", "GptOss", "Gemma2", "DeepseekV3"])
@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 700.0},
        {"rope_scaling": {**YARN, "rope_theta": 900.0}, "rope_theta": 700.0},
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": {"rope_theta": 5000.0}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
        {"rope_scaling": {}, "rope_parameters": {**YARN, "rope_theta": 5000.0, "truncate": None}},
        {"rope_parameters": {}},
        {"rope_parameters": None},
        {"rope_parameters": None, "rope_theta": 300.0},
        {"rope_parameters": ...},
    ],
)
def test_the_rotations_that_count(family, keys):
    config = of(family, **keys)
    expected, section = theirs(of(family, **keys)).rope_parameters, checked_model(config)
    assert section.rope_theta == expected["rope_theta"]
    kind = section.rope_scaling.rope_type if section.rope_scaling else "default"
    assert kind == expected["rope_type"]
    if kind != "default":
        assert section.rope_scaling.factor == expected["factor"]
    if kind == "yarn":
        assert section.rope_scaling.truncate == bool(expected.get("truncate", True))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 70.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},  # rope_type "default" stands beside it, and counts
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": None, "rope_theta": 80.0},
        {"rope_parameters": None, "rope_local_base_freq": 60.0},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 50.0}, "full_attention": None}},
    ],
)
def test_gemma_3_lays_the_older_block_over_the_newer(keys):
    config = of("Gemma3Text", **({"rope_parameters": NESTED["rope_parameters"]} | keys))
    expected, section = theirs(json.loads(json.dumps(config))).rope_parameters, checked_model(config)
    full = expected["full_attention"]
    assert section.rope_theta == full["rope_theta"]
    assert section.rope_local_base_freq == expected["sliding_attention"]["rope_theta"]
    assert (section.rope_scaling.factor if section.rope_scaling else 1.0) == (
        full["factor"] if full["rope_type"] != "default" else 1.0
    )


@pytest.mark.parametrize("family", sorted(set(ROWS) - {"GPT2", "Mpt", "GPTNeoX", "Phi3", "StableLm", "Gemma3Text"}))
def test_a_share_of_the_head_that_the_class_ignores(family):
    plain = scaled("default")["rope_parameters"]
    for keys in (
        {"partial_rotary_factor": 0.5, "rope_parameters": plain},
        {"rope_parameters": {**plain, "partial_rotary_factor": 0.5}},
    ):
        assert checked_model(of(family, **keys)).partial_rotary_factor == 1.0
    with pytest.raises(UserError, match=r"^partial_rotary_factor: 0\.5 .*'linear'"):
        checked_model(
            of(family, rope_parameters={**plain, "rope_type": "linear", "factor": 2.0}, partial_rotary_factor=0.5)
        )


def test_a_share_of_the_head_that_the_class_takes():
    for keys in ({"partial_rotary_factor": 0.5, "rope_parameters": None}, scaled("default", partial_rotary_factor=0.5)):
        assert checked_model(of("Phi3", **keys)).partial_rotary_factor == 0.5
    # GPT-NeoX's has names of its own, and looks at no others.
    neox = checked_model(of("GPTNeoX", rope_parameters=None, rotary_pct=0.5, rotary_emb_base=300, rope_theta=9.0))
    assert (neox.partial_rotary_factor, neox.rope_theta) == (0.5, 300.0)
    assert checked_model(of("GPTNeoX", rope_parameters=None, partial_rotary_factor=0.5)).partial_rotary_factor == 0.25


def test_what_a_missing_key_means():
    config = of("Phi3", "longrope", max_position_embeddings=...)
    section = checked_model(config)
    assert section.max_position_embeddings == theirs(config).max_position_embeddings == 4096
    assert section.rope_scaling.factor == 4096 / 32
    section = checked_model(of("DeepseekV3", norm_topk_prob=None, rope_interleave=None))
    assert (section.moe.norm_topk_prob, section.mla.rope_interleave) == (False, False)  # as transformers takes null


# ---- what is refused, in one line: the key, the values given and, behind `...`, what else the line names


LONG = longrope(32, 4)["rope_parameters"]
WRONG = [
    ("Llama", {"model_type": "qwen2"}, "model_type: 'qwen2'"),
    ("Llama", {"model_type": []}, "model_type: []"),
    ("Llama", {"rms_norm_eps": None}, "rms_norm_eps: null"),
    ("Llama", {"rms_norm_eps": "x"}, "rms_norm_eps: 'x'"),
    ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: nan"),
    ("Llama", {"rope_parameters": None, "rope_theta": float("inf")}, "rope_theta: inf"),
    ("Llama", {"vocab_size": None}, "vocab_size: missing"),
    ("GPT2", {"vocab_size": None}, "vocab_size: null"),
    ("Llama", {"vocab_size": 10**18}, "vocab_size: 1000000000000000000"),
    ("Llama", {"hidden_size": int(1e30)}, "hidden_size: "),
    ("Llama", {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000"),
    ("Llama", {"intermediate_size": 2**31 - 1, "hidden_size": 6 * 2**28, "num_hidden_layers": 9999}, "the sizes imply"),
    ("Llama", {"tie_word_embeddings": "x"}, "tie_word_embeddings: 'x'"),
    ("Llama", {"hidden_act": [1, 2]}, "hidden_act: ... [1, 2]"),
    ("Llama", {"rope_parameters": {"rope_type": [1]}}, "rope_scaling: rope_type [1]"),
    ("Llama", {"rope_parameters": [1]}, "rope_parameters: "),
    ("Llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: ... 'llama3'"),
    ("Llama", {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types: 4 layers of chunked_att"),
    ("Llama", {"eos_token_id": [0, "x"]}, "eos_token_id: [0, 'x']"),
    ("Llama", {"bos_token_id": [0]}, "bos_token_id: [0]"),
    ("Llama", {"pad_token_id": 1.5}, "pad_token_id: 1.5"),
    ("Llama", {"architectures": [[1]]}, "architectures: ... [1]"),
    ("GPT2", {"scale_attn_weights": None}, "scale_attn_weights: None"),
    ("GPT2", {"activation_function": {}}, "activation_function: ... {}"),
    ("GPTNeoX", {"head_dim": -1}, "head_dim: -1 ... must be 8"),
    ("GPTNeoX", {"rotary_pct": None, "rope_parameters": None}, "partial_rotary_factor: ... None"),
    ("DeepseekV3", {"head_dim": 2.5}, "head_dim: 2.5 ... qk_rope_head_dim, 8"),
    ("DeepseekV3", {"head_dim": None}, "head_dim: None ... qk_rope_head_dim, 8"),
    ("DeepseekV3", {"n_group": 4}, "n_group: 4 groups ... 6 experts"),
    ("Gemma3Text", {"sliding_window": None}, "sliding_window: "),
    ("Gemma3Text", {"rope_parameters": {"sliding_attention": "x"}}, "sliding_attention: "),
    ("Gemma3Text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: ... 'rope_type'"),
    ("Qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding_window: "),
    ("Qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types: 3 layers of full_attention"),
    ("Qwen2", {"max_window_layers": "x"}, "max_window_layers: ... 'x'"),
    ("GptOss", {"layer_types": 3}, "layer_types: 3"),
    ("GptOss", {"layer_types": []}, "layer_types: "),
    ("GptOss", {"num_hidden_layers": None}, "num_hidden_layers: null"),
    ("GptOss", {"rope_parameters": {**YARN, "rope_theta": 1}}, "rope_theta: 1 "),
    ("Mpt", {"attn_config": "x"}, "attn_config: "),
    ("Mpt", {"attn_config": {"attn_pdrop": "x"}}, "attn_config.attn_pdrop: 'x'"),
    ("SmolLM3", {"no_rope_layers": 3}, "no_rope_layers: ... 3"),
    ("SmolLM3", {"no_rope_layers": [1, "x", 1, 1]}, "no_rope_layers: [1, 'x', 1, 1]"),
    ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers: 1 entries for 4 layers"),
    ("Qwen3Moe", {"num_experts_per_tok": ...}, "num_experts_per_tok: 8 ... 6 experts"),
    ("Phi3", {"rope_parameters": 0}, "rope_parameters: ... 0"),
    ("Phi3", {"rope_parameters": {"rope_type": None}}, "rope_scaling: rope_type None"),
    ("Phi3", {"original_max_position_embeddings": None, "rope_scaling": LONG}, "original_max_position_embeddings"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "said"), WRONG, ids=[f"{f} {next(iter(k))}" for f, k, _ in WRONG])
def test_one_line_names_the_key(family, keys, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(of(family, **keys)))
    with pytest.raises(UserError) as error:
        section_of(tmp_path)
    wanted = re.escape(f"{tmp_path}/config.json: {said}").replace(re.escape(" ... "), ".* ")
    assert re.match(wanted, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        section_of(tmp_path)


def test_other_names_that_a_model_may_have():
    assert checked_model(of("DeepseekV3", model_type="kimi_k2")) == checked_model(of("DeepseekV3"))
    assert checked_model(of("Mpt", architectures=["MPTForCausalLM"])) == checked_model(of("Mpt"))
    assert checked_model(of("Llama", model_type=...)) == checked_model(of("Llama"))


def test_the_name_of_a_nonlinearity_stays():
    """Of two names with one meaning; transformers' logits differ by them in the last digits."""
    written = to_config_json(checked_model(of("Llama", hidden_act="gelu_new")))
    assert written["hidden_act"] == "gelu_pytorch_tanh"
    assert keep_activation_names(written, {"hidden_act": "gelu_new"}) == written | {"hidden_act": "gelu_new"}
    for other in ("gelu", "silu", "nonsense", None, []):
        assert keep_activation_names(written, {"hidden_act": other}) == written


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3Text"])
def test_a_scale_that_gemma_cannot_store_is_refused(family):
    """Transformers loads no config.json whose query_pre_attn_scalar is not an integer."""
    section = checked_model(of(family))
    assert isinstance(to_config_json(section)["query_pre_attn_scalar"], int)
    with pytest.raises(UserError, match=r"model\.attention_multiplier is 0\.3, .* train with 0\.30"):
        to_config_json(section.model_copy(update={"attention_multiplier": 0.3}))


# ---- mistakes in a family's file


def own_family(monkeypatch, table):
    """Llama's family with another table of keys."""
    from_hf, to_hf = renaming({"family": "llama"}, table, llama.DEFAULTS)
    parts = {name: getattr(llama, name) for name in ("__file__", "ARCHITECTURES", "MODEL_TYPE", "WEIGHTS")}
    family = SimpleNamespace(**parts, KEYS=table, from_hf=from_hf, to_hf=to_hf)
    monkeypatch.setattr("weft.families.families", lambda: {"llama": family})


def test_a_key_that_the_family_forgets_is_refused_if_it_matters(monkeypatch):
    own_family(monkeypatch, same())
    for name, refused in (("relu2", True), ("silu", False), ("swish", False)):
        config = of("Llama", hidden_act=name)
        with (
            pytest.raises(UserError, match=r"^hidden_act: 'relu2'.* 'silu'; add the key to KEYS") if refused else stay()
        ):
            checked_model(config)
    own_family(monkeypatch, same("hidden_act", without=("rms_norm_eps",)))
    with pytest.raises(UserError, match=r"^rms_norm_eps: 0\.25,"):
        checked_model(of("Llama", rms_norm_eps=0.25))


def test_a_table_with_an_unknown_key_is_the_familys_mistake(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(of("Llama")))
    for key, near in (("hiden_act", "hidden_act"), ("moe.num_expert", "num_experts"), ("mo.x", "")):
        own_family(monkeypatch, same() | {key: "hidden_act"})
        with pytest.raises(UserError, match=rf"llama\.py: KEYS has '{key}'.*{near}"):
            section_of(tmp_path)


@pytest.mark.parametrize("name", ["MODEL_TYPE", "to_hf"])
def test_a_family_without_an_attribute_is_named(monkeypatch, name):
    monkeypatch.delattr(llama, name)
    families.cache_clear()
    with pytest.raises(UserError, match=rf"llama\.py: a model family needs {name}; add it"):
        families()


# ---- anything at all


ANYTHING = [
    None,
    -1,
    0,
    1,
    "x",
    [],
    {},
    1e9,
    10**9,
    10**18,
    1e30,
    True,
    False,
    2.5,
    [1, 2],
    [[]],
    {"a": 1},
    float("nan"),
]
FURTHER = (
    "rope_scaling", "rope_theta", "head_dim", "sliding_window", "layer_types", "partial_rotary_factor", "hidden_act",
    "num_key_value_heads", "no_rope_layers", "rope_parameters",
)  # fmt: skip


@pytest.mark.parametrize("family", ROWS)
def test_anything_under_any_key(family):
    """A model, or a UserError in one line, and at once: nothing is left to chance of what Python makes of a value."""
    config = of(family)
    places = [(key,) for key in (*config, *(key for key in FURTHER if key not in config))]
    places += [(key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value]
    tried = random.Random(family).sample(list(itertools.product(places, ANYTHING)), 300)
    started, said = time.process_time(), []
    for place, value in tried:
        changed = json.loads(json.dumps(config))
        (changed if len(place) == 1 else changed[place[0]])[place[-1]] = value
        try:
            checked_model(changed)
        except UserError as error:
            said.append(str(error))
    assert time.process_time() - started < 5, "a size was counted up to"
    assert not any("\n" in line or len(line) > 400 for line in said)
