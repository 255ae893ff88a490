"""A decoder's exchangeable components in a run's file: built-ins by name, classes of one's own read but never "
"imported."""

import json
import subprocess
import sys

import jsonschema
import pytest
from config_cases import SHORT, load, problems, shows, write

from weft.config.dump import dump_yaml
from weft.config.reference import json_schema, markdown

OWN = '''\
import torch
from torch import nn
raise RuntimeError("imported")

class Norm(nn.Module):
    def __init__(self, width, eps): ...
    def forward(self, x): ...

class Inherits(Norm):
    def __init__(self, width, eps, *, extra: int = 3): ...

class Act:
    def __call__(self, x, gain: float = 1.0): ...

class Rotate(nn.Module):
    def __init__(self, config): ...
    def forward(self, q, k, positions): ...

class Embed(nn.Module):
    def __init__(self, config): ...
    def embed(self, x, positions): ...

class Attention(nn.Module):
    def __init__(self, config): ...
    def forward(self, q, k, v, mask=None): ...

class Scheme:
    def __call__(self, name, shape, role, generator, config): ...

class Every:
    """Every so-manieth key."""
    def __init__(self, *, step: int, shifts: list[int] = [0]): ...
    def __call__(self, query, key): ...

class Wants:
    def __init__(self, width, eps, depth): ...
    def __call__(self, x): ...

class Nothing:
    def __init__(self, width): ...

class Keys:
    def __call__(self, query): ...

class More:
    def __call__(self, x, y, *, z): ...

class Needy(Scheme):
    def __init__(self, config): ...

class Unreadable(torch.nn.modules.loss.Nowhere):
    pass

def function(x): ...
'''
KEYS = {
    "norm": "own_parts:Norm",
    "hidden_act": "own_parts:Act",
    "position": "own_parts:Rotate",
    "attention_implementation": "own_parts:Attention",
    "initialization": "own_parts:Scheme",
}


@pytest.fixture(autouse=True)
def _own():
    write(OWN, "own_parts.py")


def with_model(**keys):
    return SHORT.replace("model: llama-tiny", f"model: {json.dumps({'preset': 'llama-tiny'} | keys)}")


def only_problem(**keys):
    (line,) = problems(with_model(**keys))
    return line


def test_classes_of_ones_own_are_found_without_importing_them():
    config = load(with_model(**KEYS, attention_pattern={"type": "own_parts:Every", "step": 3}))
    assert {key: getattr(config.model, key) for key in KEYS} == KEYS
    assert config.model.attention_pattern.arguments == {"step": 3, "shifts": [0]}
    saved = dump_yaml(config)
    again = load(saved, name="again.yaml")
    assert again.model == config.model
    program = (
        "import sys; from weft.config.run import RunConfig as R; R.load('run.yaml', check_data=False); "
        "print({'torch', 'own_parts'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "keys",
    [
        {"norm": "own_parts:Inherits"},
        {"norm": "torch.nn:LayerNorm"},
        {"norm": "own_parts:Unreadable"},
        {"hidden_act": "torch.nn:Mish"},
        {"position": "own_parts:Embed"},
    ],
)
def test_what_can_be_called_as_weft_calls_it_is_taken(keys):
    assert load(with_model(**keys)).model.model_dump().items() >= keys.items()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"norm": "rmsnrom"},
            "must be one of rmsnorm, rmsnorm1p, layernorm, not 'rmsnrom'; did you mean 'rmsnorm'?",
        ),
        ({"norm": "batch"}, "layernorm, not 'batch'; or use module:Class"),
        ({"norm": 3}, "must be one of rmsnorm, rmsnorm1p, layernorm or module:Class, not 3"),
        ({"norm": "own-parts:Norm"}, "'own-parts:Norm' is not a module:Class; write the module as in an import"),
        (
            {"norm": "own_prts:Norm"},
            "no module 'own_prts' in the working directory or among installed packages; did you mean 'own_parts'?",
        ),
        ({"norm": "own_parts:Nrom"}, "'own_parts:Nrom': no class 'Nrom' in own_parts.py; use one of Norm"),
        ({"norm": "own_parts:function"}, "'function' is not a class (own_parts.py:"),
        (
            {"norm": "own_parts:Act"},
            "Act(width, eps, ...) ... no argument by position; define it as __init__(self, width, eps, ...)",
        ),
        ({"norm": "own_parts:Wants"}, "Wants requires depth ... width, eps; give all other arguments defaults"),
        (
            {"norm": "own_parts:Nothing"},
            "Nothing(width, eps, ...) ... width by position; define it as __init__(self, width, eps, ...)",
        ),
        (
            {"hidden_act": "own_parts:More"},
            "Weft calls __call__(x), ... (own_parts.py:45) has __call__(x, y, z); change the method's arguments",
        ),
        ({"hidden_act": "own_parts:Embed"}, "Embed (own_parts.py:19) has no method __call__(x) or forward(x); add it"),
        (
            {"position": "own_parts:Norm"},
            "'own_parts:Norm': Weft calls forward(q, k, positions), ... (own_parts.py:5) has forward(x)",
        ),
        (
            {"attention_pattern": {"type": "own_parts:Keys"}},
            "Weft calls __call__(query, key), ... (own_parts.py:42) has __call__(query)",
        ),
        (
            {"initialization": "own_parts:Needy"},
            "Needy requires config ... no arguments; give all other arguments defaults",
        ),
        ({"attention_pattern": "sliding"}, "must be a mapping, such as model.attention_pattern: {type: sliding}"),
        (
            {"attention_pattern": {"type": "slidng"}},
            "unknown attention_pattern 'slidng'; did you mean 'sliding'? (use one of",
        ),
        ({"attention_pattern": {"type": "sliding"}}, "attention_pattern.window: required argument of Sliding"),
        ({"attention_pattern": {"type": "sliding", "window": 0}}, "window: must be at least 1, not 0"),
        (
            {"attention_pattern": {"type": "strided", "strid": 4}},
            "attention_pattern.strid: unknown key; did you mean 'stride'?",
        ),
        ({"attention_pattern": {"type": "own_parts:Every", "step": "a"}}, "step: must be an integer, not 'a'"),
        (
            {"attention_pattern": {"type": "fixed", "stride": 4, "expressivity": 5}},
            "expressivity: 5 ... set at most 4",
        ),
        (
            {"attention_pattern": {"type": "strided", "stride": 4}, "sliding_window": 9},
            "model.sliding_window: ... sliding window; remove one of the",
        ),
        (
            {"attention_implementation": "flash", "attention_pattern": {"type": "strided", "stride": 4}},
            "flash-attn supports no sparse pattern; set model.sliding_window instead, or set flex",
        ),
        (
            {"attention_implementation": "flash", "attention_sinks": True},
            "attention_sinks: flash-attn ... remove the key, or set",
        ),
        (
            {"attention_implementation": "own_parts:Attention", "attention_sinks": True},
            "attention_sinks: a custom class ... remove the key, or set",
        ),
        (
            {"attention_implementation": "flex", "attention_dropout": 0.1},
            "model.attention_dropout: ... remove the key, or set model.attention_implementation: sdpa",
        ),
    ],
)
def test_a_mistake_is_one_line(keys, said):
    line = only_problem(**keys)
    assert shows(line, "run.yaml:1: model.")
    assert shows(line, said)


def test_another_pattern_takes_the_place_of_the_base_files_or_the_checkpoints(tmp_path):
    pattern = {"type": "strided", "stride": 4}
    base = load(with_model(attention_pattern=pattern), "model.attention_pattern={type: bigbird}")
    assert base.model.attention_pattern.arguments["block_size"] == 64
    step = tmp_path / "old" / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step / "model.json").write_text(json.dumps(load(with_model(attention_pattern=pattern)).model.model_dump()))
    text = SHORT.replace("model: llama-tiny", f"model: {{from: {tmp_path / 'old'}}}")
    assert load(text).model.attention_pattern.arguments == {"stride": 4}
    assert load(text, "model.attention_pattern.stride=5").model.attention_pattern.arguments == {"stride": 5}
    assert load(text, "model.attention_pattern={type: bigbird}").model.attention_pattern.type == "bigbird"
    assert load(text, "model.attention_pattern=null").model.attention_pattern is None


def test_flash_attn_wants_sixteen_bits():
    (line,) = problems(with_model(attention_implementation="flash") + "", "training.dtype=float32")
    assert line == (
        "command line: training.dtype: flash-attn computes in 16 bits; set training.dtype: bfloat16, or "
        "model.attention_implementation: auto"
    )
    assert load(with_model(attention_implementation="flash")).model.attention_implementation == "flash"


def test_the_schema_and_the_page_know_the_parts():
    check = jsonschema.Draft202012Validator(json_schema()).is_valid
    for keys in (KEYS, {"attention_pattern": {"type": "fixed", "stride": 4}}, {"norm": "layernorm"}):
        assert check({"model": keys})
    for pattern in ({"type": "own:Every", "anything": 1}, {"type": "bigbird"}):
        assert check({"model": {"attention_pattern": pattern}})
    for keys in (
        {"norm": "batch"},
        {"norm": "own-parts:Norm"},
        {"attention_pattern": {"type": "none"}},
        {"attention_pattern": {"window": 3}},
        {"attention_pattern": {"type": "fixed", "strid": 4}},
    ):
        assert not check({"model": keys}), keys
    assert "| `norm` | `rmsnorm`, `rmsnorm1p`, `layernorm` or module:Class | `rmsnorm` |" in markdown()
    assert "#### model.attention_pattern: `type: bigbird`" in markdown()


SIZES = "data: {train: store, sequence_length: 64}\ntraining: {steps: 3}\n"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("sliding_window: 0, sliding_window_pattern: 2", "sliding_window: must be at least 1, not 0"),
        ("sliding_window: -5, layer_types: [sliding_attention]", "sliding_window: must be at least 1, not -5"),
        ("sliding_window: .inf, sliding_window_pattern: 2", "sliding_window: must be ... .inf"),
        ("sliding_window: 1e30, sliding_window_pattern: 2", "sliding_window: must be at most 2147483647, not"),
        ("sliding_windw: 4, sliding_window_pattern: 2", "sliding_windw: unknown key; did you mean"),
        ("sliding_window_pattern: 2", "sliding_window_pattern: the sliding window has no size; set"),
        ("alibi_bias_max: 16", "alibi_bias_max: no effect, because model.position is rope; remove the key, or set"),
        ("position: none, alibi_bias_max: 2", "alibi_bias_max: no effect, because model.position is none; remove"),
        ("position: alibi, alibi_bias_max: 1e308", "alibi_bias_max: must be at most 126, not"),
    ],
)
def test_windows_and_slopes(model, said):
    (found,) = problems(f"model: {{num_hidden_layers: 1, hidden_size: 64, num_attention_heads: 4, {model}}}\n{SIZES}")
    assert shows(found, f"run.yaml:1: model.{said}")


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "logit_softcap", "clip_qkv", "residual_multiplier"])
def test_numbers_that_float32_cannot_hold_are_refused(key):
    (found,) = problems(
        f"model: {{num_hidden_layers: 1, hidden_size: 64, num_attention_heads: 4, {key}: 1e40}}\n{SIZES}"
    )
    assert shows(found, f"run.yaml:1: model.{key}: must be at most 1000000, not")


def test_the_largest_bias_has_slopes_above_zero():
    torch = pytest.importorskip("torch")
    from weft.kernels.attention import alibi_slopes

    model = "{num_hidden_layers: 1, hidden_size: 96, num_attention_heads: 6, position: alibi, alibi_bias_max: 126}"
    config = load(f"model: {model}\n{SIZES}").model
    assert (alibi_slopes(6, config.alibi_bias_max, torch.device("cpu")) >= torch.finfo(torch.float32).tiny).all()
