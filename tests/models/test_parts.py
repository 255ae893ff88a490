"""Parts of a decoder by name or of the user's own: the same numbers as the built-ins that they repeat."""

import math
import re
import sys
import types
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ruamel.yaml import YAML
from running import QUIET, assert_same_weights, finish, losses, start, train
from torch import nn

import weft
from weft.cli.main import main
from weft.config.errors import UserError
from weft.config.model import ModelSection
from weft.generate.sample import generate
from weft.kernels import flash
from weft.models.build import build_model
from weft.models.huggingface import config_of
from weft.models.initialize import initial_value, initialize
from weft.models.roles import parameter_roles

SHAPE = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
PATTERNS = [
    {"type": "sliding", "window": 5},
    {"type": "fixed", "stride": 4, "expressivity": 2},
    {"type": "strided", "stride": 4},
    {"type": "bigbird", "block_size": 2, "window": 2, "random_blocks": 1},
    {"type": "longformer", "window": 4, "global_tokens": 2},
    {"type": "my_parts:Odd", "step": 2},
]
PARTS = '''
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    """RMSNorm as in a textbook."""

    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gain


class Noisy(Norm):
    """Of which every layer begins elsewhere."""

    def __init__(self, width, eps):
        super().__init__(width, eps)
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(width))


class Act(nn.Module):
    """silu with a slope that is learned."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.full((1,), 1.0))

    def forward(self, x):
        return x * torch.sigmoid(self.slope * x)


class Learned(nn.Module):
    """A table, added."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embed(self, x, positions):
        return x + self.table(positions)


class Complex(nn.Module):
    """Rotations as products of complex numbers, of frequencies in a buffer."""

    def __init__(self, config):
        super().__init__()
        half = config.rotary_dim // 2
        self.register_buffer("freqs", config.rope_theta ** (-torch.arange(half).double() / half), persistent=False)

    def forward(self, q, k, positions):
        angles = (positions.unsqueeze(-1) * self.freqs).unsqueeze(1)
        turns = torch.complex(angles.cos(), angles.sin())

        def turn(x):
            first, second = x.double().chunk(2, -1)
            out = torch.complex(first, second) * turns
            return torch.cat((out.real, out.imag), -1)

        return turn(q), turn(k)


class Attention:
    """All scores, written out."""

    def __init__(self, config):
        self.scale = config.qk_head_dim**-0.5

    def __call__(self, q, k, v, mask):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * self.scale
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


class Normal:
    """N(0, initializer_range), as `normal`."""

    def __call__(self, name, shape, role, generator, config):
        assert role in ("embedding", "head", "matrix"), (name, role)
        return torch.randn(shape, generator=generator) * config.initializer_range


class Flat:
    def __call__(self, name, shape, role, generator, config):
        return torch.zeros(shape.numel())


class Odd:
    def __init__(self, *, step: int):
        self.step = step

    def __call__(self, query, key):
        return (query - key) % self.step == 0
'''
OWN = {
    "norm": "my_parts:Norm",
    "hidden_act": "my_parts:Act",
    "position": "my_parts:Complex",
    "attention_implementation": "my_parts:Attention",
    "initialization": "my_parts:Normal",
}


@pytest.fixture(autouse=True)
def _parts(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    yield
    sys.modules.pop("my_parts", None)


def decoder(dtype=torch.float64, **changes):
    model = build_model(ModelSection(**SHAPE | {"initializer_range": 0.2, "initialization": "normal"} | changes))
    initialize(model.to(dtype), seed=4)
    return model


def tokens(batch=2, seq=24):
    return torch.randint(0, 61, (batch, seq), generator=torch.Generator().manual_seed(1))


def packed():
    """Two rows of documents of 9, 1 and 14, and of 17 and 7 tokens."""
    segments = torch.tensor([[0] * 9 + [1] + [2] * 14, [0] * 17 + [1] * 7])
    positions = torch.tensor([[*range(9), 0, *range(14)], [*range(17), *range(7)]])
    return segments, positions


def the_same(one, other, within=1e-9):
    """Equal logits and, parameter by parameter in order, equal gradients."""
    outs = [model(tokens()) for model in (one, other)]
    assert (outs[0] - outs[1]).abs().max() < within
    grad = torch.randn_like(outs[0])
    found = [torch.autograd.grad(out, list(m.parameters()), grad) for out, m in zip(outs, (one, other), strict=True)]
    shapes = [sorted((g.abs().sum().item(), g.numel()) for g in grads if g.numel() > 1) for grads in found]
    for (ours, size), (theirs, other_size) in zip(*shapes, strict=True):
        assert size == other_size
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("own", "built_in"),
    [
        ({"norm": "my_parts:Norm"}, {"norm": "rmsnorm"}),
        ({"norm": "torch.nn:LayerNorm", "norm_placement": "both"}, {"norm": "layernorm", "norm_placement": "both"}),
        ({"hidden_act": "my_parts:Act"}, {"hidden_act": "silu"}),
        ({"hidden_act": "torch.nn:GELU", "mlp": "plain"}, {"hidden_act": "gelu", "mlp": "plain"}),
        ({"position": "my_parts:Complex"}, {"position": "rope"}),
        ({"position": "my_parts:Complex", "no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 0]}),
        ({"attention_implementation": "my_parts:Attention"}, {"attention_implementation": "auto"}),
        ({"attention_implementation": "my_parts:Attention", "sliding_window": 4}, {"sliding_window": 4}),
        ({"attention_implementation": "sdpa"}, {}),
        ({"attention_pattern": {"type": "sliding", "window": 6}}, {"sliding_window": 6}),
    ],
)
def test_a_part_of_ones_own_is_the_built_in_that_it_repeats(own, built_in):
    the_same(decoder(**own), decoder(**built_in))


def test_a_learned_table_of_ones_own_is_the_built_in():
    ours, theirs = decoder(position="my_parts:Learned"), decoder(position="learned")
    assert "position.table.weight" in parameter_roles(ours)
    ours.position.table.weight.data.copy_(theirs.embed_positions.weight)
    the_same(ours, theirs)


def test_an_initialization_of_ones_own_draws_by_seed_and_name():
    ours, theirs = decoder(initialization="my_parts:Normal"), decoder(initialization="normal")
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7, msg=name)
    with pytest.raises(UserError, match=r"my_parts:Flat gave a tensor of \(1952,\) for embed_tokens.weight, which is"):
        decoder(initialization="my_parts:Flat")


def test_parameters_of_ones_own_begin_as_their_class_says_and_have_roles():
    section = ModelSection(**SHAPE | OWN | {"norm": "my_parts:Noisy"})
    with torch.device("meta"):
        meta = build_model(section)
    state = torch.random.get_rng_state()
    values = {name: initial_value(meta, name, seed=4) for name, _ in meta.named_parameters()}
    assert torch.equal(state, torch.random.get_rng_state())
    gains = [value for name, value in values.items() if name.endswith("gain")]
    assert len(gains) == 5
    assert not torch.equal(gains[0], gains[1])
    assert all(0.85 < gain.mean() < 1.15 and gain.std() > 0.01 for gain in gains)
    assert values["layers.1.mlp.activation.slope"].item() == 1.0
    again = {name: initial_value(build_model(section), name, seed=4) for name in values}
    assert all(torch.equal(values[name], again[name]) for name in values)
    assert not torch.equal(initial_value(meta, "norm.gain", seed=5), values["norm.gain"])
    meta.to_empty(device="cpu")
    initialize(meta, seed=4)
    assert meta.position.freqs[0] == 1  # a buffer
    roles = parameter_roles(meta)
    assert {name for name, role in roles.items() if role == "norm"} == {n for n in roles if n.endswith("gain")}
    assert roles["layers.0.mlp.activation.slope"] == "other"


def apart(model):
    """The packed rows, and each document alone."""
    segments, positions = packed()
    whole = model(tokens(), segments=segments, positions=positions)
    alone = []
    for row, ids in enumerate(segments):
        parts = [tokens()[row : row + 1, ids == document] for document in ids.unique()]
        alone.append(torch.cat([model(part) for part in parts], 1))
    return whole, torch.cat(alone)


CHOICES = [*({"attention_pattern": pattern} for pattern in PATTERNS), OWN, {"attention_implementation": "flash"}]
ids = [*(pattern["type"] for pattern in PATTERNS), "own", "flash"]


@pytest.mark.parametrize("choice", CHOICES, ids=ids)
def test_documents_are_kept_apart(choice):
    model = decoder(**choice).eval()
    with torch.no_grad():  # without a GPU, flash is for training alone an error
        whole, alone = apart(model)
    assert (whole - alone).abs().max() < 1e-9


@pytest.mark.parametrize("choice", CHOICES, ids=ids)
def test_generation_with_a_cache_is_that_without(choice):
    model = decoder(**choice).eval()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9], [7, 8]]

    def greedy(prompts, **settings):
        steps = list(generate(model, prompts, max_new_tokens=12, temperature=0.0, **settings))
        return [[step[i] for step in steps] for i in range(len(prompts))]

    together = greedy(prompts)
    assert together == greedy(prompts, cache=False)
    assert together == [greedy([prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("pattern", PATTERNS, ids=ids[:-2])
def test_a_pattern_changes_the_model_and_latent_attention_knows_it(pattern):
    mla = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
    for more in ({}, {"mla": mla, "num_key_value_heads": 4}):
        sparse, full = decoder(attention_pattern=pattern, **more), decoder(**more)
        assert (sparse(tokens())[:, 0] - full(tokens())[:, 0]).abs().max() < 1e-12
        assert (sparse(tokens()) - full(tokens())).abs().max() > 1e-3


@pytest.mark.parametrize(
    "choice",
    [OWN, {"attention_pattern": PATTERNS[3]}, {"attention_implementation": "sdpa"}, {"sliding_window": 4}],
    ids=["own", "bigbird", "sdpa", "window"],
)
def test_compiled_blocks_are_one_graph(choice):
    segments, positions = packed()
    model = decoder(**choice)
    expected = model(tokens(), segments=segments, positions=positions)
    for block in model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch._dynamo.config.patch(error_on_recompile=_ == 1):
            out = model(tokens(), segments=segments, positions=positions)
    assert (out - expected).abs().max() < 1e-9
    out.sum().backward()


# ---- flash-attn, by what its documentation says that its functions do


def dense(q, k, v, seen, softmax_scale, softcap, alibi_slopes):
    """`[seq, heads, head_dim]`"""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(len(q))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.view(-1, 1, 1).to(scores) * (places.unsqueeze(1) - places).abs()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):  # fmt: skip
    assert causal
    assert dropout_p == 0
    assert cu_seqlens_q.dtype == torch.int32
    ends, out = cu_seqlens_k.tolist(), []
    assert max(b - a for a, b in pairwise(ends)) <= max_seqlen_q == max_seqlen_k
    for first, end in pairwise(ends):
        places = torch.arange(end - first)
        distance = places.unsqueeze(1) - places
        left, right = window_size
        seen = (distance >= 0) & (distance <= left if left >= 0 else True)
        assert right in (-1, 0)
        out.append(dense(*(x[first:end] for x in (q, k, v)), seen, softmax_scale, softcap, alibi_slopes))
    return torch.cat(out)


def flash_attn_func(q, k, v, **settings):
    batch, seq = q.shape[:2]
    ends = torch.arange(batch + 1, dtype=torch.int32) * seq
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, seq, seq, **settings)
    return out.unflatten(0, (batch, seq))


@pytest.fixture
def flash_attn(monkeypatch):
    """A package of that name, in plain PyTorch for any device; the calls of its functions."""
    calls = []

    def counted(function):
        def call(*arguments, **settings):
            calls.append(function.__name__)
            return function(*arguments, **settings)

        return call

    package = types.ModuleType("flash_attn")
    package.flash_attn_func, package.flash_attn_varlen_func = counted(flash_attn_func), counted(flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("weft.kernels.masks.flash_usable", lambda *_: True)
    return calls


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sliding_window": 5, "sliding_window_pattern": 2},
        {"attn_logit_softcapping": 2.0, "attention_multiplier": 0.3},
        {"position": "alibi"},
        {
            "mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6},
            "num_key_value_heads": 4,
        },
    ],
    ids=["plain", "windows", "softcap", "alibi", "latent"],
)
def test_flash_attn_is_asked_for_what_it_knows(flash_attn, keys):
    ours, theirs = decoder(attention_implementation="flash", **keys), decoder(**keys)
    the_same(ours, theirs)
    segments, positions = packed()
    outs = [model(tokens(), segments=segments, positions=positions) for model in (ours, theirs)]
    assert (outs[0] - outs[1]).abs().max() < 1e-9
    assert flash_attn == ["flash_attn_func"] * 2 + ["flash_attn_varlen_func"] * 2


def test_flash_attn_where_it_cannot_be_is_one_line(monkeypatch):
    model = decoder(attention_implementation="flash")
    with pytest.raises(UserError) as error:
        model(tokens())
    assert str(error.value) == (
        "model.attention_implementation: flash: flash-attn's kernels run on GPUs, and this is a cpu; set auto"
    )
    cuda = torch.device("cuda")
    with pytest.raises(UserError, match=r"know bfloat16 and float16, and this is float64; set training.dtype"):
        flash.flash_usable(cuda, torch.float64)
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="is not installed; pip install flash-attn, or set auto"):
        flash.flash_usable(cuda, torch.bfloat16)
    with torch.no_grad():
        assert not flash.flash_usable(cuda, torch.bfloat16)
        assert torch.equal(model(tokens()), decoder()(tokens()))


# ---- whole runs

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def run(run_yaml, tmp_path):
    def write(name, model, **changes):
        training = {"steps": 4, "batch_tokens": 512, "micro_batch_size": 4, "dtype": "float64"}
        training |= changes.pop("training", {})
        file = run_yaml(
            f"{name}.yaml", run={"name": name}, model=model, training=training,
            schedule={"type": "constant", "warmup_steps": 0},
            validation={"every": 4, "tokens": 128}, checkpoint={"every": 2}, log=QUIET, **changes,
        )  # fmt: skip
        return file, tmp_path / "runs" / name

    return write


def test_a_run_with_parts_of_ones_own_is_sharded_resumed_loaded_and_not_exported(run, tmp_path, capsys):
    model = TINY | OWN | {"norm": "my_parts:Noisy", "attention_pattern": {"type": "my_parts:Odd", "step": 3}}
    file, one = run("one", model)
    two, sharded = run("two", model, parallel={"dp_shard": 2})
    process = start(two, "--nproc", 2, cwd=tmp_path)
    assert train(file, "training.steps=2") == 0
    assert train(file) == 0
    code, errors = finish(process)
    assert code == 0, errors
    assert [step for step, *_ in losses(one)] == [1, 2, 3, 4]
    for (_, *ours), (_, *theirs) in zip(losses(one), losses(sharded), strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-9)
    assert_same_weights(one, sharded, within=1e-9)
    loaded = weft.load_model(one)
    first = initial_value(loaded, "layers.0.mlp.activation.slope", seed=7)
    assert loaded.layers[0].mlp.activation.slope != first  # learned
    assert loaded.position.freqs[0] == 1
    assert loaded(tokens()).isfinite().all()
    capsys.readouterr()
    assert main(["export", str(one), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "model.norm is 'my_parts:Noisy', which Hugging Face's LlamaForCausalLM has no" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"hidden_act": "my_parts:Act"}, "model.hidden_act is 'my_parts:Act', which"),
        ({"attention_implementation": "my_parts:Attention"}, "model.attention_implementation is 'my_parts:Attention'"),
        ({"attention_pattern": PATTERNS[0]}, r"model.attention_pattern is \{type: sliding, ...\}, which"),
    ],
)
def test_what_hugging_face_has_no_code_for_is_told(keys, said):
    with pytest.raises(UserError, match=said):
        config_of(ModelSection(**SHAPE | keys))


def test_what_computes_the_same_is_exported():
    chosen = {"attention_implementation": "flex", "initialization": "my_parts:Normal"}
    assert config_of(ModelSection(**SHAPE | chosen)) == config_of(ModelSection(**SHAPE))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_pytorch_train_in_any_precision(run, dtype):
    own = {"norm": "torch.nn:LayerNorm", "hidden_act": "torch.nn:Mish", "position": "my_parts:Learned"}
    own["attention_pattern"] = {"type": "strided", "stride": 8}
    file, path = run(dtype, TINY | own, training={"dtype": dtype})
    assert train(file) == 0
    assert losses(path)[-1][1] < losses(path)[0][1]


def test_a_norm_without_parameters_may_return_what_it_likes():
    class Plain(nn.Module):
        def __init__(self, width, eps):
            super().__init__()

        def forward(self, x):
            return F.layer_norm(x.double(), x.shape[-1:])

    sys.modules["my_parts"] = types.SimpleNamespace(Plain=Plain)
    model = decoder(torch.bfloat16, norm="my_parts:Plain")
    assert model(tokens()).isfinite().all()


def test_the_page_on_parts_tells_the_truth(run, tmp_path):
    """Its example trains, is loaded, and generates with a cache what it does without."""
    page = (Path(__file__).parents[2] / "docs" / "parts.md").read_text(encoding="utf-8")
    code, yaml = (re.search(rf"```{language}\n(.*?)```", page, re.S).group(1) for language in ("python", "yaml"))
    (tmp_path / "my_parts.py").write_text(code)
    model = YAML(typ="safe").load(yaml)["model"]
    assert set(model) == {"preset", *OWN, "attention_pattern"}
    file, path = run("page", TINY | model | {"vocab_size": 512}, training={"dtype": "bfloat16"})
    assert train(file) == 0
    assert losses(path)[-1][1] < losses(path)[0][1]
    loaded = weft.load_model(path)
    greedy = [list(generate(loaded, [[1, 2, 3], [4]], max_new_tokens=9, temperature=0, cache=c)) for c in (True, False)]
    assert greedy[0] == greedy[1]
    roles = parameter_roles(loaded)
    assert roles["layers.0.attention_norm.alpha"] == "norm"
    assert roles["layers.0.attention.attend.own.temperature"] == "other"
    for key in (*OWN, "attention_pattern"):
        assert f"| `{key}` |" in page
