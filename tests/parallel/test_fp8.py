"""Products in 8 bits: which, rounded how, and what training makes of them. torchao is an extra: skipped without it."""

import logging
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from compare import Run
from fp8_parts import fit_emulating, gathered
from matrix import MODELS, Case, ranks_of, write_run
from running import QUIET, losses, train

from weft.config.mesh import mesh_shape
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.parallel.fp8 import raise_unless_usable, round_rows, use_fp8
from weft.parallel.model_state import model_plan
from weft.train.frozen_fit import Source
from weft.train.frozen_sources import frozen_plan

pytestmark = pytest.mark.xdist_group("ranks")


def test_a_torchao_that_cannot_be_imported_leaves_logging_as_it_was(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError):
        use_fp8(torch.nn.Linear(2, 2), [])
    assert logging.getLogger("weft").isEnabledFor(logging.ERROR)
    assert logging.getLogger("weft").isEnabledFor(logging.WARNING)


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao.float8")


def decoder(name: str):
    model = build_model(ModelSection(**{key: value for key, value in MODELS[name].items() if key != "family"}))
    initialize(model, 0)
    return model.to(torch.bfloat16)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To 8 bits, the largest number to the largest that there is."""
    factor = (torch.finfo(dtype).max / tensor.abs().max().double()).float()
    return (tensor.float() * factor).to(dtype).float() / factor


def test_the_blocks_linear_maps_are_rounded_and_nothing_else(torchao):
    plain, model = decoder("moe"), decoder("moe")
    use_fp8(model, list(model.layers), emulate=True)
    changed = {name for name, module in model.named_modules() if isinstance(module, torchao.float8_linear.Float8Linear)}
    linear = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    assert changed == linear - {"lm_head"}
    assert model.state_dict().keys() == plain.state_dict().keys()

    x = torch.randn(2, 8, 32, dtype=torch.bfloat16, requires_grad=True)
    mapped = model.layers[0].attention.q_proj
    out = mapped(x)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert torch.equal(out, (rounded(x, e4m3) @ rounded(mapped.weight, e4m3).T).to(out.dtype))
    gradient = torch.randn_like(out)
    out.backward(gradient)
    given = rounded(gradient.flatten(0, 1), e5m2)
    torch.testing.assert_close(mapped.weight.grad, (given.T @ rounded(x.flatten(0, 1), e4m3)).to(out.dtype))
    torch.testing.assert_close(x.grad.flatten(0, 1), (given @ rounded(mapped.weight, e4m3)).to(out.dtype))


def test_what_does_not_fit_stays(torchao):
    model = decoder("dense")
    use_fp8(model, list(model.layers), ranks=4, emulate=True)  # 32 numbers over 4 ranks are 8 on each
    assert not any(isinstance(module, torchao.float8_linear.Float8Linear) for module in model.modules())


def fitted(runner, case: Case, name: str, **training) -> tuple[Run, dict[str, int]]:
    """A run of three steps, and the bytes of its all-gathers by process group."""
    file = write_run(runner.folder, case, steps=3, name=name, training={"dtype": "bfloat16"} | training)
    sent = runner.pool.call(fit_emulating, ranks_of(case.mesh), file, True, seconds=120)
    return Run(runner.folder / name), sent[0]


@pytest.mark.parametrize(
    "mesh", [{}, *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ({"dp_shard": 2}, {"tp": 2}))], ids=str
)
def test_training_is_close_to_bfloat16(runner, torchao, mesh):
    case = Case("dense", "plain", mesh, layers=2)
    wide = runner.run(case, steps=3, name="wide", training={"dtype": "bfloat16"})
    found = {}
    for fp8 in (True, "rowwise"):
        narrow, _ = fitted(runner, case, f"narrow-{fp8}", fp8=fp8)
        np.testing.assert_allclose(narrow.metrics["loss"], wide.metrics["loss"], rtol=0.02)
        assert not np.array_equal(narrow.metrics["loss"], wide.metrics["loss"])
        assert narrow.steps[-1].keys() == wide.steps[-1].keys()
        found[fp8] = narrow.metrics["loss"]
    assert not np.array_equal(found[True], found["rowwise"])


def test_rounding_a_weight_twice_by_rows_is_rounding_it_once(torchao):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False).bfloat16()))
    use_fp8(model, [model[0]], "rowwise", emulate=True)
    weight = model[0][0].weight
    with torch.no_grad():  # rows of zeros, of tiny numbers, and with an outlier
        weight[3], weight[5], weight[8], weight[7, 3] = 0, weight[5] * 1e-6, weight[8] * 1e-20, 300.0
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for _ in range(2):
        out = model(x)
        gradients = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
        found.append((out.detach(), *gradients))
        with torch.no_grad():
            numbers, factors = round_rows(weight)
            weight.copy_(numbers.to(torch.bfloat16) * factors)
    (once, of_inputs, of_weights), (twice, again, same) = found
    assert torch.equal(once, twice)
    assert torch.equal(of_weights, same)
    torch.testing.assert_close(again, of_inputs, rtol=0.01, atol=1e-3)  # rounded by columns: small numbers can vanish


@pytest.mark.long
def test_weights_of_products_by_rows_are_gathered_in_8_bits(runner, torchao):
    alone, _ = fitted(runner, Case("gqa", "plain", {"tp": 2}), "alone", fp8="rowwise")
    case = Case("gqa", "plain", {"dp_shard": 2, "tp": 2})
    _, whole = fitted(runner, case, "full", fp8=True)
    narrow, sent = fitted(runner, case, "rows", fp8="rowwise")
    np.testing.assert_allclose(narrow.metrics["loss"], alone.metrics["loss"], rtol=1e-6)
    # Rows x columns of a block on one tp rank: q, k, v, gate and up are split by rows, o and down by columns.
    shapes = [(32, 32), (16, 32), (16, 32), (32, 32), (32, 32), (32, 32), (32, 32)]
    saved = sum(rows * columns - 2 * rows for rows, columns in shapes)
    gathers = 3 * 2 * (4 + 3)  # steps x micro-batches x blocks in forward, and all but the last again in backward
    assert gathers * saved in {whole[group] - sent[group] for group in whole}


def test_other_parameters_of_a_unit_are_gathered_as_they_are(runner, torchao):
    for seen, whole, (root, block) in runner.pool.call(gathered, 2, seconds=120):
        assert torch.equal(seen["sinks"], whole["sinks"])  # of a layer that has children
        assert torch.equal(seen["wide"], whole["wide"])  # sharded over its second dimension
        numbers, factors = round_rows(whole["proj.weight"])
        assert torch.equal(seen["proj.weight"], numbers.to(torch.bfloat16) * factors)
        assert not torch.equal(seen["proj.weight"], whole["proj.weight"])
        assert ("8 bits" in root, "8 bits" in block) == (False, True)


def test_a_frozen_start_rounds_as_the_trained_model(runner):
    config = RunConfig.load(write_run(runner.folder, Case("dense", "plain", {}), steps=1, name="start"))
    plan, shape = replace(model_plan(config), fp8="rowwise"), mesh_shape(config.parallel, 1)
    for start, fp8 in ((True, "rowwise"), (False, False)):
        assert frozen_plan(config, plan, Source("reference", config.model, None, start), shape).fp8 == fp8


def test_a_device_without_them_is_refused(run_yaml, capsys):
    with pytest.raises(UserError, match=r"training.fp8: this run is on a CPU.*; remove the key"):
        raise_unless_usable(torch.device("cpu"))
    if not torch.cuda.is_available():
        assert train(run_yaml(training={"dtype": "bfloat16", "fp8": True})) == 2
        assert "training.fp8: this run is on a CPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_trains_in_them(run_yaml, tmp_path, torchao):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU knows no products in 8 bits")
    found = {}
    for fp8 in (False, True, "rowwise"):
        name = f"fp8-{fp8}"
        file = run_yaml(f"{name}.yaml", run={"name": name}, training={"dtype": "bfloat16", "fp8": fp8}, log=QUIET)
        assert train(file) == 0
        found[fp8] = [loss for _, loss, _ in losses(tmp_path / "runs" / name)]
    for fp8 in (True, "rowwise"):
        np.testing.assert_allclose(found[fp8], found[False], rtol=0.05)
        assert found[fp8] != found[False]
