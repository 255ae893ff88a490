"""Log-probabilities of labels against a log-softmax written out; gradients against finite differences."""

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


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("vocabulary", [50, 20_000])
def test_equals_a_softmax_written_out(softcap, vocabulary, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 150)  # several chunks, the last one short
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(vocabulary, 6, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (2, 7))
    expected = written_out(hidden, weight, labels, softcap)
    assert torch.allclose(token_logprobs(hidden, weight, labels, softcap), expected, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_are_those_of_finite_differences(softcap, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 33)
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (7,))
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, labels, softcap), (hidden, weight))


def test_bfloat16_gives_float32_log_probabilities():
    torch.manual_seed(0)
    hidden, weight = torch.randn(16, 32), 0.3 * torch.randn(200, 32)
    labels = torch.randint(0, 200, (16,))
    result = token_logprobs(hidden.bfloat16(), weight.bfloat16(), labels)
    assert result.dtype == torch.float32
    exact = written_out(hidden.bfloat16().double(), weight.bfloat16().double(), labels)
    assert (result - exact).abs().max() < 0.05  # the products' rounding, not the softmax's
