"""Parameters that are not trained, and those that are trained with other learning rates, chosen by their names."""

import json
from fnmatch import fnmatch

import pytest
import torch
from running import QUIET, assert_same_weights, losses, metrics, train, weights

from weft.config.run import RunConfig
from weft.models.build import build_model, frozen_matmul_parameters, matmul_parameters
from weft.models.initialize import initialize

FREEZE = ["embed_tokens", "layers.[01]", "*.q_proj.weight"]
FROZEN = ("embed_tokens.*", "layers.[01].*", "*.q_proj.weight")
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}


@pytest.fixture
def write(run_yaml):
    """Writes runs of one step: `write("name", training={"freeze": [...]})`."""

    def write(name, **changes):
        training = {"steps": 1, "batch_tokens": 512, "dtype": "float64", "grad_clip": None}
        return run_yaml(
            f"{name}.yaml",
            run={"name": name},
            data={"validation": None},
            optimizer={"weight_decay": 0.0} | changes.pop("optimizer", {}),
            schedule={"type": "constant", "warmup_steps": 0},
            training=training | changes.pop("training", {}),
            log=QUIET,
            **changes,
        )

    return write


def initial(file):
    config = RunConfig.load(file)
    model = build_model(config.model).to(torch.float64)
    initialize(model, config.run.seed)
    return model.state_dict()


def moved(file, run):
    """How far each parameter is from where it began."""
    before = initial(file)
    return {name: (value - before[name]).abs() for name, value in weights(run).items()}


def test_frozen_parameters_stay_and_have_no_state_and_a_run_goes_on_to_the_bit(write, tmp_path, capsys):
    straight, broken = (write(name, training={"freeze": FREEZE, "steps": 3}) for name in ("straight", "broken"))
    assert train(straight) == 0
    assert " parameters (" in (said := capsys.readouterr().err)
    assert " trained), 3 steps" in said
    run = tmp_path / "runs" / "straight"
    distances = moved(straight, run)
    index = json.loads((run / "checkpoints" / "step-00000003" / "index.json").read_text())
    for name, distance in distances.items():
        frozen = any(fnmatch(name, pattern) for pattern in FROZEN)
        assert bool(distance.any()) != frozen, name
        assert (f"optimizer.{name}.exp_avg" in index["tensors"]) != frozen, name
    assert train(broken, "training.steps=1") == 0
    assert train(broken) == 0
    assert losses(run) == losses(tmp_path / "runs" / "broken")
    assert_same_weights(run, tmp_path / "runs" / "broken")
    # What is trained later begins anew; what has been trained cannot be frozen in the same run.
    run = tmp_path / "runs" / "broken"
    assert train(broken, "training.steps=4", "training.freeze=[embed_tokens]", "--accept-changes") == 0
    assert all(distance.any() != ("embed" in name) for name, distance in moved(broken, run).items())
    capsys.readouterr()
    assert train(broken, "training.steps=5", "training.freeze=[lm_head]", "--accept-changes") == 2
    assert "lm_head.weight has optimizer state in the checkpoint, but this run does not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"training": {"freeze": ["embed_tokens", "layers.0.atention.*"]}},
            "training.freeze: 'layers.0.atention.*' matches no parameter's name; did you mean 'layers.0.attention'?",
        ),
        (
            {"optimizer": {"lr_multipliers": {"lm_heat": 2.0}}},
            "optimizer.lr_multipliers: 'lm_heat' matches no parameter's name; did you mean 'lm_head'?",
        ),
        (
            {"optimizer": {"lr_multipliers": {"*Q_proj*": 2.0}}},
            "optimizer.lr_multipliers: '*Q_proj*' matches no parameter's name; did you mean '*.q_proj'?",
        ),
        (
            {"training": {"freeze": ["lm_head"]}, "optimizer": {"lr_multipliers": {"*head*": 2.0}}},
            "optimizer.lr_multipliers: '*head*' matches only frozen parameters, such as lm_head.weight; remove it",
        ),
        ({"training": {"freeze": ["*"]}}, "training.freeze: the patterns freeze all parameters; remove one"),
    ],
)
def test_patterns_without_sense_are_one_line(write, capsys, section, said):
    assert train(write("bad", **section)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.long), "muon"])
def test_learning_rates_by_layer_and_by_name(write, tmp_path, optimizer):
    """After one step a parameter has moved by its factor times what it moves without one."""
    chosen = {"layer_decay": 0.5, "lr_multipliers": {"layers.*": 3.0, "*.mlp.*": 0.25, "lm_head.weight": 0.1}}
    common = {"optimizer": {"type": optimizer, "lr": 1e-3}, "callbacks": [{"type": "lr_monitor"}]}
    plain = write("plain", **common)
    scaled = write("scaled", **common | {"optimizer": common["optimizer"] | chosen})
    assert train(plain) == train(scaled) == 0
    one, other = (moved(file, tmp_path / "runs" / file.stem) for file in (plain, scaled))
    layers = RunConfig.load(plain).model.num_hidden_layers
    for name, distance in one.items():
        factor = 1.0
        if name.startswith("layers."):
            factor = (0.25 if ".mlp." in name else 3.0) * 0.5 ** (layers - int(name.split(".")[1]))
        elif name == "embed_tokens.weight":
            factor = 0.5 ** (layers + 1)
        elif name == "lm_head.weight":
            factor = 0.1
        torch.testing.assert_close(other[name], distance * factor, rtol=1e-6, atol=1e-12, msg=name)
    (line,) = metrics(tmp_path / "runs" / "scaled")
    assert line["lr"] == metrics(tmp_path / "runs" / "plain")[0]["lr"] == 1e-3

    # A resumed run has the new factors.
    changes = ("optimizer.layer_decay=1", "optimizer.lr_multipliers={norm: 2}", "--accept-changes")
    assert train(scaled, "training.steps=2", *changes) == 0
    last, base = metrics(tmp_path / "runs" / "scaled")[1], 1e-3 if optimizer == "adamw" else 3e-3
    rates = [value for key, value in last.items() if key.startswith("lr/norm")]
    assert sorted(rates) == pytest.approx([2 * base, 3 * base])  # the final norm's, and the layers' as before


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"moe": MOE}, {"preset": "gpt-oss-20b"}])
def test_frozen_matrices_have_no_gradient_to_compute(write, tmp_path, changes):
    model = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, **changes}
    if "preset" in changes:
        model |= {"num_key_value_heads": 2, "moe": MOE | {"first_k_dense_replace": 0}}
    with torch.device("meta"):
        built = build_model(RunConfig.load(write("model", model=model)).model)
    assert frozen_matmul_parameters(built) == 0
    built.requires_grad_(False)
    assert frozen_matmul_parameters(built) == matmul_parameters(built)
