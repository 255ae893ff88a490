"""The section `adapter`: what is refused without building a model, at which line."""

import json

import pytest

from weft.cli.main import main
from weft.config.adapter import AdapterSection, layer_of
from weft.config.run import RunConfig
from weft.errors import ConfigError

MODEL = {
    "type": "decoder", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24,
}  # fmt: skip
MOE = {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}}


@pytest.fixture
def write(tmp_path):
    """Writes a run file whose base model is a checkpoint of MODEL and `model`, as far as config files tell."""

    def write(adapter, base_model=None, **sections):
        base = tmp_path / "base" / "checkpoints" / "step-00000001"
        base.mkdir(parents=True, exist_ok=True)
        (base / "model.json").write_text(json.dumps(MODEL | (base_model or {})))
        content = {
            "model": {"from": str(tmp_path / "base")},
            "data": {"train": "store"},
            "training": {"steps": 3},
            "adapter": adapter,
        } | sections
        file = tmp_path / "run.yaml"
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in content.items()))
        return file

    return write


def problems(file):
    with pytest.raises(ConfigError) as found:
        RunConfig.load(file, check_data=False)
    return str(found.value)


@pytest.mark.parametrize(
    ("adapter", "model", "sections", "message"),
    [
        ({"r": 0}, {}, {}, "run.yaml:4: adapter.r: must be at least 1, not 0"),
        ({"rank": 8}, {}, {}, "run.yaml:4: adapter.rank: unknown key"),
        ({"targets": []}, {}, {}, "run.yaml:4: adapter.targets: the list is empty"),
        ({"targets": ["attn.q_proj"]}, {}, {}, "adapter.targets: 'attn.q_proj' matches no layer; did you mean"),
        ({"targets": ["qproj"]}, {}, {}, "adapter.targets: 'qproj' matches no layer; did you mean 'q_proj'?"),
        ({"targets": ["embed_tokens"]}, {}, {}, "'embed_tokens': the embedding cannot have an adapter"),
        ({"targets": "all-linear", "dora": True}, MOE, {}, "adapter.dora: stacked experts do not support dora"),
        ({"init": "pissa", "quantize": "nf4"}, {"intermediate_size": 32}, {}, "adapter.init: pissa changes the frozen"),
        (
            {"quantize": "nf4"},
            {},
            {},
            "adapter.quantize: layers.0.mlp.down_proj has 24 inputs, which is not a multiple",
        ),
        ({}, {}, {"model": MODEL}, "run.yaml:4: adapter: an adapter needs a trained model; set model.from"),
        ({}, {}, {"training": {"steps": 3, "fp8": True}}, "run.yaml:3: training.fp8: adapters do not support fp8"),
        ({}, {}, {"training": {"steps": 3, "freeze": ["norm"]}}, "training.freeze: the adapter freezes all other"),
    ],
    ids=str,
)
def test_mistakes_are_found_without_a_model(write, adapter, model, sections, message):
    assert message in problems(write(adapter, model, **sections))


def test_defaults_and_scales(write):
    config = RunConfig.load(write({}), check_data=False)
    assert config.adapter.model_dump() == AdapterSection().model_dump()
    assert (config.adapter.targets, config.adapter.scale) == ("auto", 2.0)
    assert AdapterSection.model_validate({"r": 16, "alpha": 8.0, "rslora": True}).scale == 2.0
    assert RunConfig.load(write(None), check_data=False).adapter is None


@pytest.mark.parametrize(("saved", "other"), [("nf4", None), ("nf4", "int8"), (None, "nf4")], ids=str)
def test_an_adapter_goes_on_with_the_quantized_weights_of_its_run(write, tmp_path, saved, other):
    checkpoint = tmp_path / "old" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.json").write_text(json.dumps(MODEL))
    (checkpoint / "adapter.json").write_text(
        json.dumps({"adapter": {**AdapterSection().model_dump(), "quantize": saved}})
    )
    source = {"from": str(tmp_path / "old")}
    for adapter in (source, source | {"quantize": saved}):
        file = write(adapter, {"intermediate_size": 32})
        assert RunConfig.load(file, check_data=False).adapter.quantize == saved
    found = problems(write(source | {"quantize": other}, {"intermediate_size": 32}))
    shown = ["null" if one is None else one for one in (other, saved)]
    message = f"run.yaml:4: adapter.quantize: {shown[0]} differs from the {shown[1]} of the adapter"
    assert f"{message} {tmp_path / 'old'}" in found


def test_the_plan_shows_the_adapter(write, capsys):
    file = write({"r": 4, "targets": ["q_proj", "experts.up_proj"]}, MOE)
    assert main(["config", "check", str(file), "--no-data"]) == 0
    # In 2 layers: 4 x (32 + 32), and for each of 4 experts 4 x (32 + 16).
    assert "2.0k trained parameters: LoRA of rank 4, scale 8, on 4 layers" in capsys.readouterr().out


def test_names_of_tensors():
    for layer, separator in (("layers.0.attention.q_proj", "."), ("layers.0.mlp.experts.up_proj", "_")):
        for kind in ("lora_a", "lora_b0", "lora_magnitude"):
            assert layer_of(f"{layer}{separator}{kind}") == (layer, kind)
    assert layer_of("layers.0.attention.q_proj.weight") is None
