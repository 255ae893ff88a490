"""Asking models of the user's own: what their forward names, and what they must not miss."""

import pytest
import torch
from torch import nn

from weft.errors import UserError
from weft.models.forward import forward_of

TOKENS = torch.randint(0, 11, (2, 5))
INPUTS = {"tokens": TOKENS, "positions": None, "segments": None, "labels": TOKENS.roll(-1, 1)}


class Logits(nn.Module):
    def forward(self, tokens):
        return torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Labelled(Logits):
    def forward(self, tokens, labels):
        return super().forward(tokens).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class Apart(Logits):
    def forward(self, tokens, segments=None):
        return super().forward(tokens) * (1 if segments is None else segments.unsqueeze(-1))


def test_a_model_of_logits_and_one_of_log_probabilities_give_the_same():
    assert torch.allclose(forward_of(Logits())(INPUTS), forward_of(Labelled())(INPUTS))


@pytest.mark.parametrize("model", [Logits, Labelled])
def test_a_model_that_cannot_keep_documents_apart_is_told(model):
    with pytest.raises(UserError, match=rf"{model.__name__}.forward .*segments.*data.document_attention to false"):
        forward_of(model())(INPUTS | {"segments": torch.ones(2, 5)})


def test_a_model_gets_the_segments_that_it_names():
    call = forward_of(Apart())
    assert not torch.allclose(call(INPUTS), call(INPUTS | {"segments": torch.zeros(2, 5)}))


def test_a_model_of_logits_gets_a_function_of_them():
    def doubled(logits, tokens):
        return 2 * logits.flatten()[tokens.start * 11 : tokens.stop * 11].view(-1, 11)

    inputs = {"tokens": TOKENS, "logits_function": doubled}
    assert torch.equal(forward_of(Logits())(inputs), 2 * Logits()(TOKENS))
