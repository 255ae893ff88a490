"""Distillation of hidden states, against transformers' hidden states and the formulas of the distances."""

import json
from types import SimpleNamespace

import pytest
import torch
from running import assert_same_weights, losses, metrics, train
from safetensors import safe_open
from test_distill_runs import write
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import weft
from weft.cli.main import main
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.models.forward import forward_of
from weft.objectives import Batch
from weft.objectives.distill import Distill
from weft.train.hidden_states import hidden_projections

SHAPE = {"vocab_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A student of 3 layers and a wider teacher of 4: folders of transformers."""
    path = tmp_path_factory.mktemp("hidden")
    for name, hidden, layers in (("student", 16, 3), ("teacher", 24, 4)):
        torch.manual_seed(layers)
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 2 * hidden}
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(path / name)
    return path


@pytest.mark.parametrize("kind", ["mse", "cosine"])
@pytest.mark.parametrize("top_k", [None, 5])
def test_loss_and_gradients_are_those_of_the_formula(models, kind, top_k):
    torch.manual_seed(0)
    tokens, weight = torch.randint(32, (2, 9)), (torch.rand(2, 9) < 0.7).float()
    batch = Batch(tokens, tokens.roll(-1, 1), weight, torch.arange(9).expand(2, 9), None, torch.arange(2))
    student, teacher = (weft.load_model(models / name) for name in ("student", "teacher"))
    pairs = [[0, 0], [2, 3], [-1, -1]]
    matrices = {number: torch.randn(24, 16, requires_grad=True) for number in (0, 2, 3)}
    for number, matrix in matrices.items():
        student.projections[str(number)] = torch.nn.Linear(16, 24, bias=False)
        student.projections[str(number)].weight.data.copy_(matrix.detach())
    options = {"teacher": "t", "top_k": top_k, "alpha": 1.0, "hidden_weight": 0.7}
    objective = Distill(**options, hidden_layers=pairs, hidden_loss=kind)
    with torch.no_grad():
        prepared = objective.prepare(lambda inputs, model: forward_of(teacher)(inputs), batch)
    batch.extra |= prepared
    found = objective.loss(forward_of(student)(objective.inputs(batch)), batch)
    found.sum.backward()

    plain, other = (AutoModelForCausalLM.from_pretrained(models / name) for name in ("student", "teacher"))
    out, states = plain(tokens, output_hidden_states=True), other(tokens, output_hidden_states=True).hidden_states
    distances = []
    for mine, theirs in pairs:
        projected, target = out.hidden_states[mine] @ matrices[mine % 4].T, states[theirs].detach()
        if kind == "mse":
            distances.append(((projected - target) ** 2).mean(-1))
        else:
            cosine = (projected * target).sum(-1) / projected.norm(dim=-1) / target.norm(dim=-1)
            distances.append(1 - cosine)
    hidden = (torch.stack(distances).mean(0) * weight).sum()
    labels = tokens.roll(-1, 1)
    cross_entropy = -(out.logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1) * weight).sum()
    (cross_entropy + 0.7 * hidden).backward()
    assert found.sum.item() == pytest.approx((cross_entropy + 0.7 * hidden).item(), rel=1e-5)
    assert found.scalars["hidden_loss"][0].item() == pytest.approx(hidden.item(), rel=1e-5)
    for number, matrix in matrices.items():
        gradient = student.projections[str(number)].weight.grad
        assert (gradient - matrix.grad).abs().max() < 1e-4 * matrix.grad.abs().max()
    embedding, wanted = student.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad
    assert (embedding - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    assert train(write(path, "teacher", objective={"type": "pretrain"}, hidden=32, steps=10)) == 0
    return path


def test_a_run_trains_the_projection_and_leaves_it_out_of_the_model(folder, capsys):
    objective = {"type": "distill", "teacher": str(folder / "teacher"), "top_k": 4, "hidden_weight": 1.0}
    options = {"objective": objective, "schedule": {"type": "constant"}, "checkpoint": {"every": 4}}
    assert train(write(folder, "straight", steps=8, **options)) == 0
    found = metrics(folder / "straight")
    assert found[-1]["hidden_loss"] < 0.8 * found[0]["hidden_loss"]
    assert found[-1]["loss"] == pytest.approx(found[-1]["divergence"] + found[-1]["hidden_loss"], rel=1e-5)
    assert "validation_hidden_loss" in found[-1]
    path = write(folder, "resumed", steps=8, **options)
    assert train(path, "training.steps=4") == 0
    assert train(path) == 0
    assert losses(folder / "resumed") == losses(folder / "straight")
    assert_same_weights(folder / "resumed", folder / "straight")
    last = max((folder / "straight" / "checkpoints").glob("step-*"))
    index = json.loads((last / "index.json").read_text())["tensors"]
    assert index["model.projections.1.weight"]["shape"] == [32, 16]

    tokens = torch.arange(20)[None]
    assert main(["export", str(folder / "straight"), str(folder / "hf")]) == 0
    with safe_open(folder / "hf" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "projection" in name]  # noqa: SIM118
    assert torch.equal(weft.load_model(folder / "straight")(tokens), weft.load_model(folder / "hf")(tokens))
    # Further runs on this model: with new projections, and without.
    again = {"model": {"from": str(folder / "straight")}, "schedule": {"type": "constant"}}
    assert train(write(folder, "again", steps=1, objective=objective, **again)) == 0
    assert train(write(folder, "after", steps=1, objective={"type": "pretrain"}, **again)) == 0
    assert metrics(folder / "again")[0]["divergence"] < 2 * found[-1]["divergence"]


TEACHER, ONE = {"teacher": "t"}, {"hidden_weight": 1.0}
REFUSED = {
    "cached": ({**ONE, "cache_teacher": True, "top_k": 4}, "too many to be cached"),
    "not used": ({"hidden_layers": [[1, 1]]}, "objective.hidden_weight: 0"),
    "no pairs": ({**ONE, "hidden_layers": [[1, 1], [2]]}, "are not pairs"),
    "a pair twice": ({**ONE, "hidden_layers": [[1, 1], [1, 2]]}, "are not pairs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_contradict_each_other_are_refused(case):
    with pytest.raises(UserError, match=REFUSED[case][1]):
        Distill(**TEACHER, **REFUSED[case][0])


@pytest.mark.parametrize(
    ("layers", "pp", "adapter", "what"),
    [
        ([[1, 2]], 1, False, "the teacher has no hidden state 2"),
        ([[-3, 0]], 1, False, "the model has no hidden state -3"),
        ([[1, 1], [-1, 0]], 1, False, "has two pairs"),
        ([[-1, -1]], 2, False, "parallel.pp: 1"),
        ([[-1, -1]], 1, True, "the adapter freezes it"),
    ],
)
def test_what_does_not_fit_the_models_is_refused(folder, layers, pp, adapter, what):
    objective = {"type": "distill", "teacher": str(folder / "teacher"), "hidden_weight": 1.0, "hidden_layers": layers}
    config = RunConfig.load(write(folder, "refused", objective=objective))
    config = config.model_copy(update={"adapter": object()}) if adapter else config
    made = Distill(**{key: value for key, value in objective.items() if key != "type"})
    with pytest.raises(UserError, match=what):
        hidden_projections(config, made, SimpleNamespace(pp=pp))
