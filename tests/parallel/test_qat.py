"""Quantization-aware training: what is rounded and how, the same on every mesh. Skipped without torchao, an extra."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compare import compare
from matrix import MODELS, Case, write_run
from matrix_parts import Sequences
from pool import RanksFailed
from running import QUIET, metrics, replaced, train

import weft
from weft.config.mesh import ParallelSection
from weft.config.model import ModelSection
from weft.config.training import QatSection
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.models.layers.moe import Experts
from weft.models.quantize import quantize
from weft.models.quantized import QuantizedWeight
from weft.parallel.local_parameters import local
from weft.parallel.model_state import ModelPlan, ModelState
from weft.parallel.qat import fake_quantize

pytestmark = pytest.mark.xdist_group("ranks")
torchao = pytest.importorskip("torchao.quantization")


def decoder(name="moe", **changes):
    model = build_model(
        ModelSection(**{key: value for key, value in MODELS[name].items() if key != "family"} | changes)
    )
    initialize(model, 0)
    return model


def rounding(model, **section):
    plan = ModelPlan(model.config, ParallelSection())
    state = ModelState(plan, SimpleNamespace(agree=lambda act: act()), local)
    fake_quantize(model, QatSection(**section), state)
    return model


def served(model):
    """The same model with the values of `--quantize int4` as its weights."""
    found = decoder("moe")
    found.load_state_dict(model.state_dict())
    quantize(model.eval(), "int4")
    weights = dict(found.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            weights[name].data.copy_(module.dequantized())
    return found


def test_int4_computes_what_is_served_and_passes_gradients_straight_through():
    tokens, labels = torch.randint(0, 256, (2, 3, 16))
    fake, other = rounding(decoder("moe")), served(decoder("moe"))
    assert fake.state_dict().keys() == other.state_dict().keys()
    found, expected = fake(tokens, labels=labels), other(tokens, labels=labels)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(fake(tokens), other(tokens), rtol=0, atol=1e-6)
    assert (found - decoder("moe")(tokens, labels=labels)).abs().max() > 0.01
    found.sum().backward()
    expected.sum().backward()
    gradients = dict(other.named_parameters())
    assert any(isinstance(module, Experts) for module in fake.modules())
    for name, parameter in fake.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_int8_int4_is_that_of_torchao():
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model, tokens = rounding(decoder("dense"), type="int8_int4", group_size=16), torch.randint(0, 256, (3, 16))
    inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=16, is_symmetric=True)
    theirs = decoder("dense")
    torchao.quantize_(theirs, QATConfig(activation_config=inputs, weight_config=weights, step="prepare"))
    x = model.embed(tokens, torch.arange(16).expand(3, 16))
    for own, other in zip(model.layers, theirs.layers, strict=True):
        torch.testing.assert_close(own(x), other(x), rtol=0, atol=1e-5)
    hidden = torch.randn(2, 5, 32)
    torch.testing.assert_close(model.logits(hidden, model.lm_head.weight), theirs.lm_head(hidden), rtol=0, atol=1e-5)
    # And what torchao serves.
    plain = decoder("dense").lm_head
    kind = torchao.Int8DynamicActivationIntxWeightConfig(torch.int4, torchao.PerGroup(16))
    torchao.quantize_(plain, kind)
    torch.testing.assert_close(model.logits(hidden, model.lm_head.weight), plain(hidden), rtol=0, atol=1e-4)


# One head of keys and values: with `tp`, its matrices are replicated, and each rank computes with some of their rows.
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("two_groups", {"tp": 2}),
        pytest.param("two_groups", {"pp": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.matrix),
        pytest.param("moe", {"dp_shard": 2, "cp": 2, "ep": 2}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_a_mesh_computes_what_one_process_does(runner, model, mesh):
    changes = {"model": SIZES if model == "two_groups" else {}, "training": {"qat": {"type": "int4"}}}
    one = runner.run(Case(model, "masked", layers=2), name="qat-one", **changes)
    difference = compare(one, runner.run(Case(model, "masked", mesh, 2), name="qat-mesh", **changes))
    assert difference.good, difference.wrong()


def test_groups_that_a_mesh_would_split_are_refused(runner):
    file = write_run(runner.folder, Case("dense", "plain", {"tp": 2}), name="split", training={"qat": {}})
    with pytest.raises(RanksFailed, match=r"training\.qat: .*tp would split the groups of 32 columns of layers"):
        runner.pool.run(file, 2, fresh=True, seconds=60)


BOTH = {"type": "int8_int4"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"qat": {"group_size": 64}}}, "training.qat.group_size: 64, but int4 has groups of 32"),
        ({"training": {"qat": {}, "fp8": True}}, "training.qat: quantization-aware training does not support fp8"),
        ({"training": {"qat": {}}, "adapter": {"r": 2}}, "training.qat: adapters do not support"),
        (
            {"training": {"qat": {"type": "int8_int4"}}, "parallel": {"tp": 2, "dp_shard": 1}},
            "parallel.tp: 2 would split",
        ),
        (
            {"training": {"qat": {"type": "int8_int4"}}, "model": {"intermediate_size": 48}},
            "does not divide the 48 columns",
        ),
    ],
    ids=["group", "fp8", "adapter", "tp", "columns"],
)
def test_what_contradicts_it_is_refused(run_yaml, capsys, changes, message):
    assert train(run_yaml(**changes)) == 2
    assert message in capsys.readouterr().err


def held_out(path, quantized):
    samples = [Chain(first=10**6)[i] for i in range(32)]
    tokens, labels = (torch.tensor(np.stack([sample[key] for sample in samples])) for key in ("tokens", "labels"))
    with torch.no_grad():
        return -weft.load_model(path, quantize=quantized)(tokens, labels=labels).mean().item()


class Chain(Sequences):
    """Each token has four successors, more and less likely."""

    def __init__(self, *, first: int = 0, count: int = 10_000):
        super().__init__(count=count, vocabulary=128)
        self.first, self.table = first, np.random.default_rng(1).integers(0, 128, (128, 4))

    def __getitem__(self, index):
        chooser = np.random.default_rng([3, self.first + index])
        tokens = [chooser.integers(128)]
        for choice in chooser.choice(4, self.length, p=[0.7, 0.2, 0.07, 0.03]):
            tokens.append(self.table[tokens[-1], choice])
        return {"tokens": np.array(tokens[:-1]), "labels": np.array(tokens[1:])}


@pytest.fixture
def chain(run_yaml, tmp_path):
    """Trains on chains: `chain(name, steps, lr=...) -> run directory`."""

    def one(name, steps, lr, source=None, **training):
        file = run_yaml(
            run={"name": name, "seed": 1},
            model=None,
            tokenizer=None,
            data=None,
            optimizer={"lr": lr, "weight_decay": 0.0},
            schedule={"warmup_steps": 2},
            training={"steps": steps, "micro_batch_size": 32, **training},
            checkpoint={"every": 1000},
            log=QUIET,
        )
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        data = {"type": "test_qat:Chain"}
        data = {"train": data, "validation": {**data, "first": 10**6, "count": 32}, "sequence_length": 32}
        model = {"vocab_size": 128, **sizes} if source is None else {"from": str(source)}
        assert train(replaced(file, model=model, data=data)) == 0
        return tmp_path / "runs" / name

    return one


def test_validation_measures_what_is_served(chain):
    run = chain("run", 3, 0.05, qat={"type": "int4"})
    assert metrics(run)[-1]["validation_loss"] == pytest.approx(held_out(run, "int4"), abs=1e-6)
    assert abs(held_out(run, None) - held_out(run, "int4")) > 1e-5


@pytest.mark.matrix
def test_the_quantized_model_is_better_than_one_trained_without_it(chain):
    """A trained model is trained on, with and without rounding: at least half of the loss by quantization is gone."""
    base = chain("base", 200, 0.05)
    plain, aware = chain("plain", 60, 0.005, base), chain("aware", 60, 0.005, base, qat={"type": "int4"})
    lost = held_out(plain, "int4") - held_out(plain, None)
    assert lost > 0.003
    assert held_out(aware, "int4") < held_out(plain, "int4") - lost / 2
