"""Log-probabilities of labels against a log-softmax written out; gradients against finite differences."""

from pathlib import Path

import pytest
import torch

from weft.kernels import cross_entropy
from weft.kernels.cross_entropy import token_logprobs


def written_out(hidden, weight, labels, softcap=None):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    exp = (logits - logits.max(-1, keepdim=True).values).exp()
    probabilities = exp / exp.sum(-1, keepdim=True)
    return probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log()


def small_blocks(monkeypatch, vocabulary: int) -> None:
    """Several blocks of several chunks, the last ones short."""
    monkeypatch.setattr(cross_entropy, "KEPT_ELEMENTS", 5 * vocabulary)
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 3 * vocabulary})


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("vocabulary", [50, 20_000])
def test_equals_a_softmax_written_out(softcap, vocabulary, monkeypatch):
    small_blocks(monkeypatch, vocabulary)
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(vocabulary, 6, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (2, 7))
    expected = written_out(hidden, weight, labels, softcap)
    assert torch.allclose(token_logprobs(hidden, weight, labels, softcap), expected, atol=1e-12)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_those_of_finite_differences(softcap, kept, monkeypatch):
    small_blocks(monkeypatch, 11)
    if kept:
        monkeypatch.setattr(cross_entropy, "KEPT_ELEMENTS", 7 * 11)
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (7,))
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, labels, softcap), (hidden, weight))

    def both(h, w):
        return token_logprobs(h, w, labels, softcap, normalizers=True)

    assert torch.autograd.gradcheck(both, (hidden, weight))
    assert torch.autograd.gradcheck(lambda h, w: both(h, w)[:, 1], (hidden, weight))
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(both(hidden, weight)[:, 1], logits.logsumexp(-1))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("vocabulary", [1024, 1025])
def test_rows_of_a_whole_number_of_pages_change_no_result(vocabulary, kept, monkeypatch):
    if not kept:
        small_blocks(monkeypatch, vocabulary)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 24, requires_grad=True) for rows in (14, vocabulary))
    labels = torch.randint(0, vocabulary, (14,))
    found = token_logprobs(hidden, weight, labels)
    expected = written_out(hidden.double(), weight.double(), labels)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    pairs = zip(*(torch.autograd.grad(x.sum(), (hidden, weight)) for x in (found, expected)), strict=True)
    for mine, right in pairs:
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


def test_bfloat16_gives_float32_log_probabilities():
    torch.manual_seed(0)
    hidden, weight = torch.randn(16, 32), 0.3 * torch.randn(200, 32)
    labels = torch.randint(0, 200, (16,))
    result = token_logprobs(hidden.bfloat16(), weight.bfloat16(), labels)
    assert result.dtype == torch.float32
    exact = written_out(hidden.bfloat16().double(), weight.bfloat16().double(), labels)
    assert (result - exact).abs().max() < 0.05  # the products' rounding, not the softmax's


def test_a_second_backward_through_the_same_graph_gives_the_same():
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    loss = token_logprobs(hidden, weight, torch.randint(0, 30, (9,))).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True))


def test_a_frozen_head_gets_no_gradient_and_changes_nothing():
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8)
    labels = torch.randint(0, 30, (9,))
    (alone,) = torch.autograd.grad(token_logprobs(hidden, weight, labels).sum(), hidden)
    (beside,) = torch.autograd.grad(token_logprobs(hidden, weight.requires_grad_(), labels).sum(), hidden)
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.long), 2.0])
def test_compiled_equals_uncompiled(softcap, monkeypatch):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if softcap is None else torch.float32  # float32 is compiled with a soft cap only
    hidden, weight = (torch.randn(rows, 8, dtype=dtype, requires_grad=True) for rows in (7, 30))
    labels = torch.randint(0, 30, (7,))
    small_blocks(monkeypatch, 30)

    def run(compiled):
        out = token_logprobs(hidden, weight, labels, softcap, compiled=compiled, normalizers=True)
        return out, *torch.autograd.grad((out * torch.arange(14).view(7, 2)).sum(), (hidden, weight))

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.allclose(a, b, atol=1e-5 if a.dtype == torch.float32 else 2e-2)


def test_float32_is_not_compiled_on_a_cpu(monkeypatch):
    """It is as fast without, and the first step does not wait for a compiler."""
    monkeypatch.setattr(cross_entropy.compiler, "compiled", lambda *args, **options: pytest.fail("compiles"))
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    labels = torch.randint(0, 30, (9,))
    found, plain = (token_logprobs(hidden, weight, labels, compiled=compiled) for compiled in (True, False))
    assert torch.equal(found, plain)
    gradients = [torch.autograd.grad(x.sum(), (hidden, weight)) for x in (found, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak memory from Linux's /proc")
@pytest.mark.parametrize("softcap", [None, 30.0])  # the first is not compiled
def test_compiled_backward_allocates_no_second_matrix_of_logits(softcap):
    """It overwrites the logits, 80 MB here, with their gradient."""
    hidden, weight = torch.randn(200, 8, requires_grad=True), torch.randn(100_000, 8, requires_grad=True)
    labels = torch.randint(0, 100_000, (200,))
    token_logprobs(hidden, weight, labels, softcap, compiled=True).sum().backward()  # compiles
    loss = token_logprobs(hidden, weight, labels, softcap, compiled=True).sum()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from the present memory
    before = peak_bytes()
    loss.backward()
    assert peak_bytes() - before < 40e6


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
