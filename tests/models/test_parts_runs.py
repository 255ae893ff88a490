"""Whole runs with parts of the user's own: sharded, resumed, loaded; and the page that describes them."""

import re
from pathlib import Path

import pytest
import torch
from part_cases import OWN, tokens
from ruamel.yaml import YAML
from running import QUIET, assert_same_weights, losses, train

import weft
from weft.cli.main import main
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.models.initialize import initial_value
from weft.models.roles import parameter_roles

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


pytestmark = pytest.mark.usefixtures("my_parts")


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


@pytest.mark.xdist_group("ranks")
@pytest.mark.long
def test_a_run_with_parts_of_ones_own_is_sharded_resumed_loaded_and_not_exported(ranks, run, tmp_path, capsys):
    model = TINY | OWN | {"norm": "my_parts:Noisy", "attention_pattern": {"type": "my_parts:Odd", "step": 3}}
    file, one = run("one", model)
    two, sharded = run("two", model, parallel={"dp_shard": 2})
    ranks.run(two, 2)
    assert train(file, "training.steps=2") == 0
    assert train(file) == 0
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
    error = capsys.readouterr().err
    assert "model.norm is 'my_parts:Noisy'" in error
    assert "LlamaForCausalLM" in error
    assert "weft.load_model" in error
    assert not (tmp_path / "hf").exists()
    assert main(["export", str(one), str(tmp_path / "graph"), "--to", "torch"]) == 0
    call, ids = torch.export.load(tmp_path / "graph" / "model.pt2").module(), tokens()
    positions, past = torch.arange(ids.shape[1]).repeat(len(ids), 1), torch.zeros(len(ids), 2, 0, 16).double()
    assert torch.allclose(call(ids, positions, *[past] * 4)[0], loaded(ids), rtol=0, atol=1e-9)


def test_what_attention_cannot_do_here_is_reported_before_any_work(run, capsys):
    file, path = run("flex", TINY)
    assert train(file, "model.attention_implementation=flash", "training.dtype=bfloat16") == 2
    error = capsys.readouterr().err
    assert error.startswith("model.attention_implementation: flash: ")
    assert error.endswith("not cpu; set it to auto\n")
    assert error.count("\n") == 1
    assert train(file, "model.attention_implementation=flex") == 0
    said = capsys.readouterr().err
    assert said.count("model.attention_implementation: flex ") == 1
    assert train(file, "--fresh") == 0
    assert losses(path)[-1][0] == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_pytorch_train_in_any_precision(run, dtype):
    own = {"norm": "torch.nn:LayerNorm", "hidden_act": "torch.nn:Mish", "position": "my_parts:Learned"}
    own["attention_pattern"] = {"type": "strided", "stride": 8}
    file, path = run(dtype, TINY | own, training={"dtype": dtype})
    assert train(file) == 0
    assert losses(path)[-1][1] < losses(path)[0][1]


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
    how = Sampling(9, temperature=0)
    greedy = [generate_ids(loaded, [[1, 2, 3], [4]], how, cache=c) for c in (True, False)]
    assert greedy[0] == greedy[1]
    roles = parameter_roles(loaded)
    assert roles["layers.0.attention_norm.alpha"] == "norm"
    assert roles["layers.0.attention.attend.own.temperature"] == "other"
    for key in (*OWN, "attention_pattern"):
        assert f"| `{key}` |" in page
