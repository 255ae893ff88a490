"""AdamW and Muon against their definitions, written out; parameter groups by role."""

import pytest
import torch
from torch import nn

from weft.optim.adamw import AdamW
from weft.optim.muon import Muon, orthogonalize
from weft.optim.parameter_groups import parameter_groups


def test_adamw_follows_its_definition():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    reference, m, v = weight.detach().clone(), 0.0, 0.0
    optimizer = AdamW([{"params": [weight]}], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for t in range(1, 6):
        weight.grad = torch.randn_like(weight)
        m, v = 0.9 * m + 0.1 * weight.grad, 0.95 * v + 0.05 * weight.grad**2
        step = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        reference = reference * (1 - 0.01 * 0.1) - 0.01 * step
        optimizer.step()
        assert torch.allclose(weight, reference, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 32, 32), (2, 16, 48), (3, 48, 16)])
def test_orthogonalize_keeps_singular_vectors_and_levels_singular_values(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=torch.float64)
    result = orthogonalize(matrices, 8)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    core = u.mT @ result @ v.mT  # diagonal if the singular vectors stayed
    assert (core - torch.diag_embed(core.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-6
    assert torch.linalg.svdvals(result).max() < 1.25
    assert torch.linalg.svdvals(result).median() > 0.65


def test_a_cpu_without_bfloat16_instructions_orthogonalizes_in_float32(monkeypatch):
    matrices, found = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0)), {}
    for native, dtype in ((True, torch.bfloat16), (None, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("weft.optim.muon.multiplies_bfloat16", lambda native=native: native)
        found[native] = orthogonalize(matrices, 5)
        assert found[native].dtype == dtype
    assert torch.allclose(found[False], orthogonalize(matrices.double(), 5).float(), atol=1e-5)
    assert torch.allclose(found[False], found[True].float(), atol=0.1)


def test_muon_follows_its_definition_for_matrices_and_adamw_elsewhere():
    torch.manual_seed(0)
    matrix, vector = (nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in ((12, 6), (6,)))
    twin, matrix_reference = nn.Parameter(vector.detach().clone()), matrix.detach().clone()
    groups = [{"params": [matrix], "role": "matrix"}, {"params": [vector], "role": "norm", "weight_decay": 0.0}]
    muon = Muon(groups, lr=0.02, momentum=0.9, weight_decay=0.1, other_lr=0.003, betas=(0.9, 0.95), eps=1e-10)
    adam = torch.optim.AdamW([twin], lr=0.003, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    buffer = torch.zeros_like(matrix)
    for _ in range(4):
        matrix.grad, vector.grad = torch.randn_like(matrix), torch.randn_like(vector)
        twin.grad = vector.grad.clone()
        buffer = 0.9 * buffer + 0.1 * matrix.grad
        direction = orthogonalize((0.9 * buffer + 0.1 * matrix.grad)[None], 5)[0] * (12 / 6) ** 0.5
        matrix_reference = matrix_reference * (1 - 0.02 * 0.1) - 0.02 * direction
        muon.step()
        adam.step()
        assert torch.allclose(matrix, matrix_reference, atol=1e-12)
        assert torch.allclose(vector, twin, atol=1e-12)


def test_muon_takes_a_stack_of_experts_as_so_many_matrices():
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 12, 6, dtype=torch.float64))
    single = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    optimizers = [Muon([{"params": params, "role": "matrix"}], lr=0.02) for params in ([stack], single)]
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for matrix, grad in zip(single, stack.grad, strict=True):
            matrix.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(stack, torch.stack(list(single)), atol=1e-12)


def test_weight_decay_is_off_for_the_roles_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    roles = {"0.weight": "matrix", "0.bias": "bias", "1.weight": "norm", "1.bias": "norm"}
    groups = parameter_groups(model, roles, ["norm", "bias"])
    optimizer = AdamW(groups, lr=0.1, weight_decay=0.5)
    decay = {group["role"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decay == {"matrix": 0.5, "bias": 0.0, "norm": 0.0}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if roles[name] == "matrix" else 1.0
        assert torch.allclose(parameter, before[name] * factor)


def test_frozen_parameters_are_in_no_group():
    model = nn.Linear(4, 4)
    model.weight.requires_grad_(False)
    groups = parameter_groups(model, {"weight": "matrix", "bias": "bias"}, [])
    assert [p is model.bias for group in groups for p in group["params"]] == [True]
