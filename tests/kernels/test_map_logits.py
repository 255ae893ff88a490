"""`map_logits` gives the values and gradients of the function of all logits at once."""

import pytest
import torch
import torch.nn.functional as F

from weft.kernels import cross_entropy, map_logits


def entropy_and_log_z(logits, tokens):
    """[n, 2]; the slice of tokens is used too."""
    logprobs = logits.log_softmax(-1)
    scale = SCALES[tokens].unsqueeze(-1)
    return torch.stack((-(logprobs.exp() * logprobs).sum(-1), logits.logsumexp(-1)), -1) * scale


torch.manual_seed(0)
SCALES = torch.rand(30, dtype=torch.float64)
HIDDEN, WEIGHT = torch.randn(3, 10, 8, dtype=torch.float64), torch.randn(17, 8, dtype=torch.float64)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("chunk", "kept"), [(17 * 4, 17 * 30), (17 * 4, 17 * 9), (1 << 20, 1 << 20)])
def test_chunks_and_blocks_are_the_full_logits(monkeypatch, softcap, chunk, kept):
    monkeypatch.setitem(map_logits.CHUNK_ELEMENTS, "cpu", chunk)
    monkeypatch.setattr(map_logits, "KEPT_ELEMENTS", kept)
    monkeypatch.setattr(cross_entropy, "KEPT_ELEMENTS", kept)
    gradient = torch.randn(3, 10, 2, dtype=torch.float64)
    found, wanted = [], []
    for results, call in ((found, "chunks"), (wanted, "full")):
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        if call == "chunks":
            out = map_logits.map_logits(hidden, weight, entropy_and_log_z, softcap)
        else:
            logits = cross_entropy.cap(F.linear(hidden, weight), softcap).flatten(0, 1)
            out = entropy_and_log_z(logits, slice(0, 30)).view(3, 10, 2)
        out.backward(gradient, retain_graph=call == "chunks")
        if call == "chunks":  # a second backward recomputes the logits that the first one has overwritten
            out.backward(gradient)
            hidden.grad, weight.grad = hidden.grad / 2, weight.grad / 2
        results.extend((out, hidden.grad, weight.grad))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_logits_of_bfloat16_are_float32_for_the_function():
    seen = []

    def record(logits, tokens):
        seen.append((logits.dtype, tokens))
        return logits.logsumexp(-1)

    hidden = HIDDEN.bfloat16().requires_grad_()
    out = map_logits.map_logits(hidden, WEIGHT.bfloat16(), record)
    assert out.dtype == torch.float32
    assert out.shape == (3, 10)
    out.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16
    assert {dtype for dtype, _ in seen} == {torch.float32}
