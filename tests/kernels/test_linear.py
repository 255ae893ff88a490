"""Matrix products by oneDNN, against those in float64."""

import pytest
import torch
import torch.nn.functional as F

from weft.kernels import linear as module
from weft.kernels.linear import linear, matmul
from weft.torch_private import multiply_onednn

needs_onednn = pytest.mark.skipif(multiply_onednn is None, reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Whatever the processor is."""
    monkeypatch.setattr(module, "ONEDNN", True)
    monkeypatch.setattr(module, "LEAST_WORK", 1)
    monkeypatch.setattr(module, "LEAST_TRANSPOSED_WORK", 1)


@needs_onednn
def test_large_products_are_computed_by_onednn():
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        linear(x, weight).sum().backward()
    assert sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events()) == 2


@needs_onednn
@pytest.mark.parametrize(("least", "number"), [(1, 2), (10**6, 1)])
def test_gradients_of_weights_can_be_left_to_mkl(monkeypatch, least, number):
    monkeypatch.setattr(module, "LEAST_TRANSPOSED_WORK", least)
    x, weight, grad = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        linear(x, weight).backward(grad)
    assert sum(event.name == "mkldnn::_linear_pointwise" for event in profile.events()) == number
    torch.testing.assert_close(weight.grad, grad.T @ x)


@needs_onednn
@pytest.mark.parametrize("rows", [8, 32])  # the gradient of the output is the first matrix, or the second
def test_onednn_gets_no_slice_of_columns_as_its_second_matrix(rows, monkeypatch):
    """With one, it takes 1,000 times as long: 20 s for 4,096 x 256 x 688."""
    given = []
    monkeypatch.setattr(module, "multiply_onednn", lambda a, b, *rest: given.append(b) or multiply_onednn(a, b, *rest))
    wide = torch.randn(rows, 40, requires_grad=True)
    x, weight, grad = torch.randn(16, 24, requires_grad=True), wide[:, :24], torch.randn(16, 40)[:, :rows]
    out = linear(x, weight)
    out.backward(grad)
    assert len(given) == 3
    assert all(b.is_contiguous() or b.mT.is_contiguous() for b in given)
    torch.testing.assert_close(out, x @ weight.T)
    torch.testing.assert_close(x.grad, grad @ weight)
    torch.testing.assert_close(wide.grad[:, :24], grad.T @ x)


@needs_onednn
@pytest.mark.parametrize("least", [1, 10**6])
def test_backward_within_autocast_follows_forward(monkeypatch, least):
    monkeypatch.setattr(module, "LEAST_TRANSPOSED_WORK", least)
    x, weight, grad = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    out = linear(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.backward(grad)
    torch.testing.assert_close(weight.grad, grad.T @ x.detach())
    torch.testing.assert_close(x.grad, grad @ weight.detach())


def error(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(40, 24), (24, 40)])
def test_values_and_gradients_are_those_of_float64(rows, columns, bias):
    torch.manual_seed(0)
    given = [torch.randn(2, 9, columns), torch.randn(rows, columns), torch.randn(rows) if bias else None]
    found, exact = [], []
    for results, dtype, function in ((found, torch.float32, linear), (exact, torch.float64, F.linear)):
        tensors = [None if x is None else x.detach().clone().to(dtype).requires_grad_() for x in given]
        out = function(*tensors)
        out.square().sum().backward()
        results += [out, *(x.grad for x in tensors if x is not None)]
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        assert error(one, other) < 1e-6
    assert found[2].stride() == (columns, 1)


@needs_onednn
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(50, 30, 20), (20, 30, 50)])
def test_matmul(shape, transposed):
    rows, inner, columns = shape
    a = torch.randn(inner, rows).T if transposed else torch.randn(rows, inner)
    b, out = torch.randn(inner, columns), torch.empty(rows, columns)
    expected = a.double() @ b.double()
    assert error(matmul(a, b), expected) < 1e-6
    assert matmul(a, b, out=out) is out
    assert error(out, expected) < 1e-6


@needs_onednn
def test_compiled_code_has_the_same_gradients():
    torch.manual_seed(0)
    x, weight = torch.randn(16, 8), torch.randn(12, 8, requires_grad=True)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    gradients = [torch.autograd.grad(f(x, weight).square().sum(), weight)[0] for f in (linear, compiled)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_autocast_are_computed_by_pytorch(dtype):
    x, weight = torch.randn(4, 8, dtype=dtype), torch.randn(3, 8, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(4, 8), torch.randn(3, 8)).dtype == torch.bfloat16
