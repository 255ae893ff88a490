"""`model.preset` and `model.from`."""

import json
from pathlib import Path

import pytest
from config_cases import load, problems, shows, write

from weft.config.model import CustomModelSection, ModelSection
from weft.config.model_sections import ExpertsSection
from weft.errors import ConfigError
from weft.families import presets, resolve_presets

REST = "data: {train: store, sequence_length: 64}\ntraining: {steps: 3}\n"
SHAPE = ModelSection(preset="llama-tiny", vocab_size=512, **presets()["llama-tiny"])


def checkpoint(step: int, section=SHAPE, run: str = "runs/old") -> Path:
    path = Path(run) / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "model.json").write_text(json.dumps(section.model_dump(mode="json", by_alias=True)))
    return path


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_whole_model(name):
    section = load(f"model: {name}\n{REST}").model
    assert section.preset == name
    for key, value in presets()[name].items():
        if isinstance(value, dict):
            assert {inner: getattr(getattr(section, key), inner) for inner in value} == value
        else:
            assert getattr(section, key) == value


@pytest.mark.parametrize(
    ("name", "change", "key", "value"),
    [
        ("gemma2-2b", "hidden_size=64", "embedding_multiplier", 8.0),
        ("gemma3-1b", "head_dim=64", "attention_multiplier", 0.125),
        ("deepseek-v2-lite", "mla.qk_nope_head_dim=-8", "attention_multiplier", None),
        ("deepseek-v2-lite", "mla.qk_nope_head_dim=32", "attention_multiplier", 0.1147213867929261 * 2**0.5),
        ("gemma2-2b", "embedding_multiplier=3", "embedding_multiplier", 3.0),
    ],
)
def test_multipliers_that_follow_from_a_width_follow_another_one(name, change, key, value):
    text = f"model: {name}\n{REST}"
    if value is None:
        assert shows(problems(text, f"model.{change}")[0], "qk_nope_head_dim")
    else:
        assert getattr(load(text, f"model.{change}").model, key) == pytest.approx(value)


def test_unknown_presets_are_refused_with_the_nearest_one_or_all_presets():
    (found,) = problems(f"model: {{preset: llama-tinyy}}\n{REST}")
    said = "unknown preset 'llama-tinyy'; did you mean 'llama-tiny'? (`weft models` lists them all)"
    assert shows(found, f"run.yaml:1: model.preset: {said}")
    (found,) = problems(f"model: {{preset: zzz}}\n{REST}")
    assert shows(found, "run.yaml:1: model.preset: unknown preset 'zzz'; choose one of ")
    assert all(name in found for name in presets())


def test_a_model_without_preset_must_say_its_sizes():
    required = "required: a size of the decoder, or a preset, such as preset: llama-60m; add it"
    assert shows(
        problems(f"model: {{hidden_size: 64}}\n{REST}"),
        [
            f"run.yaml:1: model.num_hidden_layers: {required}",
            f"run.yaml:1: model.num_attention_heads: {required}",
        ],
    )
    assert shows(problems(f"model: [a]\n{REST}")[0], "must be a preset's name or a mapping")


def test_null_overrides_a_preset():
    assert load(f"model: {{preset: llama-tiny, num_key_value_heads: null}}\n{REST}").model.num_key_value_heads is None


@pytest.mark.parametrize("path", ["runs/old", "runs/old/checkpoints", "runs/old/checkpoints/step-00000200"])
def test_the_shape_comes_from_the_newest_checkpoint(path):
    checkpoint(30, SHAPE.model_copy(update={"num_hidden_layers": 7}))
    checkpoint(200)
    (Path("runs/old/checkpoints") / ".step-00000300.partial").mkdir()
    config = load(f"model: {{from: {path}, hidden_dropout: 0.1, load_optimizer: true}}\n{REST}")
    model = config.model
    assert (model.from_, model.load_optimizer, model.hidden_dropout) == (path, True, 0.1)
    assert (model.num_hidden_layers, model.vocab_size, model.preset) == (2, 512, "llama-tiny")
    assert config.origins["model.hidden_size"] == "checkpoint runs/old/checkpoints/step-00000200"


def test_keys_that_change_the_shape_are_refused_and_those_that_agree_are_not():
    checkpoint(5)
    text = f"model: {{from: runs/old}}\n{REST}"
    load(text, "model.hidden_size=64", "model.max_position_embeddings=4096", "model.rope_theta=5e5")
    for key, has in (
        ("hidden_size=128", 64),
        ("vocab_size=1024", 512),
        ("tie_word_embeddings=true", False),
        ("head_dim=16", "null"),
    ):
        (found,) = problems(text, f"model.{key}")
        assert shows(
            found,
            f"command line: model.{key.split('=')[0]}: the checkpoint runs/old/checkpoints/step-00000005 has {has}",
        )
    (found,) = problems(f"model: {{from: runs/old, preset: gpt2}}\n{REST}")
    assert shows(found, "run.yaml:1: model.preset: model.from ... the shape; remove preset or")


def test_how_experts_are_balanced_may_be_said_anew():
    checkpoint(5, SHAPE.model_copy(update={"moe": ExpertsSection(num_experts=4, num_experts_per_tok=2)}))
    text = f"model: {{from: runs/old}}\n{REST}"
    moe = load(text, "model.moe.router_aux_loss_coef=0.5", "model.moe.num_experts=4").model.moe
    assert (moe.num_experts, moe.router_aux_loss_coef) == (4, 0.5)
    (found,) = problems(text, "model.moe.num_experts=8")
    assert shows(
        found, "command line: model.moe: the checkpoint runs/old/checkpoints/step-00000005 has {'num_experts': 4"
    )


def test_a_learned_table_has_a_shape():
    section = ModelSection(**presets()["gpt2"])
    checkpoint(5, section)
    assert shows(problems(f"model: {{from: runs/old}}\n{REST}", "model.max_position_embeddings=64")[0], "has 1024")


def test_an_own_model_can_be_gone_on_from():
    write("class Net:\n    def __init__(self, width: int): ...\n", "own.py")
    checkpoint(5, CustomModelSection(type="own:Net", width=8))
    model = load(f"model: {{from: runs/old}}\n{REST}").model
    assert (model.type, model.arguments, model.from_) == ("own:Net", {"width": 8}, "runs/old")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("runs/odl", "there is no such run, checkpoint or folder; did you mean 'old'?"),
        ("runs/x", "there is no such run, checkpoint or folder; check the path"),
        ("meta-llama/Llama", "... folder; check the path, or ... (hf download meta-llama/Llama --local-dir FOLDER)"),
        ("runs", "neither a run directory nor a checkpoint"),
        ("runs/empty", "this run has no checkpoint yet"),
    ],
)
def test_what_is_no_checkpoint(path, said):
    checkpoint(5)
    Path("runs/empty/checkpoints").mkdir(parents=True)
    (found,) = problems(f"model: {{from: {path}}}\n{REST}")
    assert shows(found, f"run.yaml:1: model.from: {path}: {said}")


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_damaged_model_file(content):
    (checkpoint(5) / "model.json").write_text(content)
    (found,) = problems(f"model: {{from: runs/old}}\n{REST}")
    assert shows(found, "model.json cannot be read")


def test_load_optimizer_needs_from():
    (found,) = problems(f"model: {{preset: llama-tiny, load_optimizer: true}}\n{REST}")
    assert shows(found, "run.yaml:1: model.load_optimizer: ... set model.from, or remove the key")


def test_a_childs_from_replaces_the_bases_preset_and_the_reverse():
    checkpoint(5)
    write(f"model: {{preset: gpt2, hidden_dropout: 0.1}}\n{REST}", "base.yaml")
    model = load("extends: base.yaml\nmodel: {from: runs/old}\n").model
    assert (model.preset, model.from_, model.hidden_dropout) == ("llama-tiny", "runs/old", 0.0)
    write(f"model: {{from: runs/old}}\n{REST}", "base.yaml")
    model = load("extends: base.yaml\nmodel: {preset: gpt2}\n").model
    assert (model.preset, model.from_) == ("gpt2", None)


def test_a_preset_made_from_another_one():
    base = {"a": {"hidden_size": 3, "moe": {"num_experts": 4, "n_group": 2}, "mla": {"kv_lora_rank": 2}}}
    own = {"b": {"preset": "a", "moe": {"num_experts": 8}, "mla": None}, "c": {"preset": "b", "hidden_size": 5}}
    found = resolve_presets(base | own, "family")
    assert found["b"] == {"hidden_size": 3, "moe": {"num_experts": 8, "n_group": 2}, "mla": None}
    assert found["c"] == found["b"] | {"hidden_size": 5}
    with pytest.raises(ValueError, match=r"'b'.* 'a'"):
        resolve_presets(own, "family")


def test_errors_are_user_errors():
    with pytest.raises(ConfigError):
        load(f"model: {{from: nowhere}}\n{REST}")
