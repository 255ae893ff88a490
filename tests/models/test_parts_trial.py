"""The trial of parts of the user's own before a run: what is wrong with one is told in one line, by key and class."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from part_cases import OWN, PATTERNS, SHAPE
from running import QUIET, train

from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.trial import try_components

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
KEYS = {
    "norm": "width, eps", "hidden_act": "", "position": "config", "attention_implementation": "config",
}  # fmt: skip
# Key, what the class does, and what the message names after `model.KEY: odd:Odd (odd.py:6)`.
QKV = ("attention_implementation", "q, k, v, mask")
FORWARD = [
    ("norm", "x", "x[..., :-1]", "a tensor of (2, 16, 31)", "(2, 16, 32)"),
    ("norm", "x", "x[:, :1]", "a tensor of (2, 1, 32)", "(2, 16, 32)"),
    ("norm", "x", "None", "None", "(2, 16, 32)"),
    ("norm", "x", "(x,)", "a tuple", "(2, 16, 32)"),
    ("norm", "x", "x > 0", "a bool tensor of (2, 16, 32)", "(2, 16, 32)"),
    ("hidden_act", "x", "x.chunk(2, -1)[0]", "a tensor of (2, 16, 24)", "(2, 16, 48)"),
    ("position", "q, k, positions", "q", "forward", "a tensor of (2, 4, 16, 8)", "two tensors"),
    ("position", "q, k, positions", "(k, q)", "forward", "queries", "a tensor of (2, 2, 16, 8)", "(2, 4, 16"),
    ("position", "q, k, positions", "(q, q)", "forward", "keys", "a tensor of (2, 4, 16, 8)", "(2, 2, 16"),
    (*QKV, "q.flatten(1)", "a tensor of (2, 512)", "(2, 4, 16, 8)"),
    (*QKV, "q.transpose(1, 2)", "a tensor of (2, 16, 4, 8)", "(2, 4, 16, 8)"),
    (*QKV, "F.scaled_dot_product_attention(q, k, v, enable_gqa=True)", "later tokens", "no mask (None)", "causal"),
]
MASKLESS = "F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)"
INIT = [
    ("self.w = torch.randn(width)", "x * self.w"),
    ("self.w = [torch.randn(width)]", "x * self.w[0]"),
    ("self.w = [nn.Linear(width, width)]", "self.w[0](x)"),
    ("self.w = float(torch.randn(1))", "x * self.w"),
]
PATTERN = [
    ("1.0 * (query >= key)", "a tensor of (2, 16, 16)"),
    ("query - key", "a int64 tensor of (2, 16, 16)"),
    ("True", "a bool,"),
    ("torch.ones(3, 3, dtype=torch.bool)", "a bool tensor of (3, 3)"),
]


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Write `odd:Odd`, and make a model section with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)

    def write(key, body, base="nn.Module", **more):
        code = HEAD + f"class Odd({base}):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        Path("odd.py").write_text(code)
        chosen = {"type": "odd:Odd"} if key == "attention_pattern" else "odd:Odd"
        return ModelSection(**SHAPE | {key: chosen} | more)

    yield write
    sys.modules.pop("odd", None)


def module(key, called, result, init="pass"):
    takes = ", ".join(["self", *filter(None, [KEYS[key]])])
    body = f"def __init__({takes}):\n    super().__init__()\n    {init}\n"
    return body + f"def {'embed' if called == 'x, positions' else 'forward'}(self, {called}):\n    return {result}\n"


def said(section, **settings):
    state = torch.random.get_rng_state()
    with pytest.raises(UserError) as error:
        try_components(section, **settings)
    assert torch.equal(state, torch.random.get_rng_state())
    assert "\n" not in str(error.value)
    return str(error.value)


def in_order(values, text):
    """Whether a message names all values, in their order."""
    places = [text.find(value) for value in values]
    return -1 not in places and places == sorted(places)


def accepted(section, **settings):
    """Whether a decoder with the parts passes the trial, which leaves the generator as it was."""
    state = torch.random.get_rng_state()
    try:
        try_components(section, **settings)
    except UserError:
        return False
    return torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_a_wrong_output_is_reported_with_both_shapes(odd, case):
    key, called, result, *values = case
    place, _, rest = said(odd(key, module(key, called, result))).partition(") ")
    assert place == f"model.{key}: odd:Odd (odd.py:6"
    assert in_order(values, rest)


def test_an_embedding_of_positions_of_another_shape_is_reported(odd):
    section = odd("position", module("position", "x, positions", "x[:, :3]"))
    assert in_order(["(odd.py:6) embed", "a tensor of (2, 3, 32)", "(2, 16, 32)"], said(section))


def test_attention_that_ignores_the_mask_is_reported_where_the_run_has_one(odd):
    key = "attention_implementation"
    section = odd(key, module(key, "q, k, v, mask", MASKLESS))
    try_components(section)
    message = said(section, documents=True)
    assert message.startswith(f"model.{key}: odd:Odd (odd.py:6) ")
    assert "keys that the mask hides" in message


@pytest.mark.parametrize(("init", "result"), INIT)
def test_what_cannot_be_built_without_memory_is_reported(odd, init, result):
    section = odd("norm", module("norm", "x", result, init))
    told = said(section)
    assert told.startswith("model.norm: odd:Odd (odd.py:6) ")
    assert "__init__" in told
    assert "register_buffer" in told


@pytest.mark.parametrize(
    ("key", "called", "result"),
    [
        ("norm", "x", "x - x.mean(1, keepdim=True)"),
        ("hidden_act", "x", "x * x.amax(1, keepdim=True)"),
        ("position", "x, positions", "x + x.flip(1)"),
    ],
)
def test_any_part_that_looks_ahead_is_reported(odd, key, called, result):
    told = said(odd(key, module(key, called, result)))
    assert told.startswith(f"model.{key}: odd:Odd (odd.py:6) ")
    assert "later tokens" in told


def test_a_backward_that_fails_is_reported_with_the_part(odd):
    body = """
        def __init__(self, width, eps):
            super().__init__()
            self.w = nn.Parameter(torch.ones(width))
        def forward(self, x):
            out = x.exp()
            return out.add_(1).detach() * self.w + out * 0 if self.training else out
    """
    told = said(odd("norm", body))
    assert told.startswith("model.norm: odd:Odd (odd.py:6) ")
    assert "RuntimeError: one of the variables needed" in told


@pytest.mark.parametrize(("result", "given"), PATTERN)
def test_a_pattern_must_return_a_bool_tensor_of_all_pairs(odd, result, given):
    section = odd("attention_pattern", f"def __call__(self, query, key):\n    return {result}\n", "object")
    place, _, rest = said(section).partition(") ")
    assert place == "model.attention_pattern: odd:Odd (odd.py:6"
    assert in_order([given, "a bool tensor of (2, 16, 16)"], rest)


@pytest.mark.parametrize("key", ["norm", "position"])
def test_a_part_that_must_be_a_module_is_reported(odd, key):
    takes, called = KEYS[key], "x" if key == "norm" else "q, k, positions"
    section = odd(key, f"def __init__(self, {takes}):\n    pass\ndef __call__(self, {called}):\n    pass\n", "object")
    message = said(section)
    assert message.startswith(f"model.{key}: odd:Odd ")
    assert message.endswith("derive the class from torch.nn.Module")


def test_a_class_of_a_package_that_does_not_fit_is_reported():
    section = ModelSection(**SHAPE | {"hidden_act": "torch.nn:GLU"})
    assert in_order(["model.hidden_act: torch.nn:GLU", "(2, 16, 24)", "(2, 16, 48)"], said(section))
    section = ModelSection(**SHAPE | {"norm": "torch.nn:Linear"})
    assert in_order(["model.norm: torch.nn:Linear ", "TypeError: "], said(section))
    section = ModelSection(**SHAPE | {"norm": "torch:tensor"})
    assert said(section).startswith("model.norm: 'torch:tensor' is ")


def test_what_is_listed_beside_its_place_in_the_module_passes(odd):
    init = "self.a = nn.Linear(width, width); self.all = [self.a]; self.gain = nn.Parameter(torch.tensor(1.0))"
    section = odd("norm", module("norm", "x", "self.gain * self.all[0](x)", init))
    assert accepted(section)


@pytest.mark.usefixtures("my_parts")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parts_that_fit_pass(dtype):
    mla = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
    for more in (
        {},
        {"position": "my_parts:Learned"},
        {"mla": mla, "num_key_value_heads": 4},
        {"norm": "my_parts:Noisy"},
    ):
        for seq in (2, 4, 64, 4096):
            section = ModelSection(**SHAPE | OWN | {"attention_pattern": PATTERNS[-1]} | more)
            assert accepted(section, dtype=dtype, seq=seq, documents=True)


@pytest.mark.usefixtures("my_parts")
@pytest.mark.parametrize("moe", [None, {"num_experts": 10**6, "num_experts_per_tok": 8, "n_group": 4, "topk_group": 2}])
def test_what_no_part_sees_is_small(moe):
    assert accepted(ModelSection(**SHAPE | OWN | {"initialization": "normal", "intermediate_size": 10**9, "moe": moe}))


def test_a_run_ends_at_once_with_one_line(odd, run_yaml, capsys):
    odd("norm", module("norm", "x", "x[..., :-1]"))
    model = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    file = run_yaml("run.yaml", model=model | {"norm": "odd:Odd"}, log=QUIET)
    assert train(file) == 2
    error = capsys.readouterr().err
    assert error.startswith("model.norm: odd:Odd (odd.py:6) ")
    assert "a tensor of (2, " in error
    assert error.count("\n") == 1


def test_what_a_part_raises_itself_is_shown_with_its_key(odd, run_yaml, capsys):
    odd("norm", module("norm", "x", "x.no_such"))
    model = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    file = run_yaml("run.yaml", model=model | {"norm": "odd:Odd"}, log=QUIET)
    assert train(file) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "odd.py:11: AttributeError: 'Tensor' object has no attribute 'no_such' (in odd:Odd, model.norm)\n"
    )
    assert error.count("\n") < 15
