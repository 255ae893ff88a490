"""Grouped matrix products against a loop over the experts, and against numerical gradients."""

import pytest
import torch

from weft.kernels.grouped import grouped_linear, grouped_linear_reference

COUNTS = {"some": [10, 0, 30, 24], "one has all": [0, 64, 0, 0], "none": [0, 0, 0, 0]}


def inputs(counts, width, out, dtype):
    generator = torch.Generator().manual_seed(3)
    rows = sum(counts)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), out, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    grad = torch.randn(rows, out, generator=generator, dtype=torch.float64).to(dtype)
    return x, weight, torch.tensor(counts).cumsum(0).int(), grad


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("width", "out"), [(48, 24), (47, 23)])  # the fused kernel wants whole 16 bytes
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-13)])
def test_equals_a_loop(counts, width, out, dtype, bound):
    x, weight, ends, grad = inputs(counts, width, out, dtype)
    ours, expected = grouped_linear(x, weight, ends), grouped_linear_reference(x, weight, ends)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected, atol=bound, rtol=bound)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=bound * 8, rtol=bound)


def test_gradients_are_right():
    x, weight, ends, _ = inputs([2, 0, 3], 4, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: grouped_linear(x, weight, ends), (x, weight))


def test_compiled_code_holds_one_call_whatever_the_counts():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, e: grouped_linear(x, w, e).square(), backend="aot_eager", fullgraph=True)
    for counts in ([10, 0, 30, 24], [1, 60, 3, 0]):
        x, weight, ends, grad = inputs(counts, 48, 24, torch.float32)
        out = compiled(x, weight, ends)
        torch.testing.assert_close(out, grouped_linear_reference(x, weight, ends).square())
        torch.autograd.grad(out, (x, weight), grad)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype):
    x, weight, ends, grad = (t.detach().cuda() for t in inputs([100, 0, 300, 112], 256, 128, dtype))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    ours, expected = grouped_linear(x, weight, ends), grouped_linear_reference(x, weight, ends)
    torch.testing.assert_close(ours, expected, atol=0.3, rtol=0.03)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1.0, rtol=0.03)
