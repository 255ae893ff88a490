"""Numbers that the host read in a forward pass are not read again in its recomputation."""

import pytest
import torch

from weft.parallel.memory.activations import checkpointed
from weft.parallel.memory.host_values import once


@pytest.mark.parametrize("mode", ["full", "selective", "budget-0.5"])
def test_a_recomputed_block_reads_once(mode):
    reads = []

    def read():
        reads.append(len(reads))
        return reads[-1] + 2.0

    def block(x):
        return (x * once(read)).sin() * once(read)

    call = checkpointed(block, mode, 0, 1, compile=False)
    first, second = (torch.ones(4, requires_grad=True) for _ in range(2))
    out = call(first), call(second)  # two micro-batches, of which the first one's backward is last
    before = len(reads)
    out[1].sum().backward()
    out[0].sum().backward()
    assert len(reads) == before  # backward reads nothing
    for x, (a, b) in ((second, reads[-2:]), (first, reads[-4:-2])):
        a, b = a + 2.0, b + 2.0
        torch.testing.assert_close(x.grad, torch.full((4,), a * b) * torch.full((4,), a).cos())


@pytest.mark.parametrize("mode", ["selective", "budget-0.5", "budget-0.9"])
def test_saved_results_are_those_of_the_same_calls(mode):
    """Recomputation lacks the operations with which the host's numbers were computed."""
    weights = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0))

    def block(x):
        factor = once(lambda: float((x.detach() @ weights[0]).sin().sum()))
        x = ((x @ weights[1]) * factor).sin()
        return ((x @ weights[2]).sin() @ weights[1]).sin()

    first, second = (torch.linspace(-1, 1, 32).view(4, 8).requires_grad_() for _ in range(2))
    block(first).square().sum().backward()
    call = checkpointed(block, mode, 0, 1, compile=False)
    call(second).square().sum().backward()
    torch.testing.assert_close(second.grad, first.grad)


def test_without_recomputation_each_call_reads():
    reads = iter(range(3))
    assert [once(lambda: next(reads)) for _ in range(3)] == [0, 1, 2]
