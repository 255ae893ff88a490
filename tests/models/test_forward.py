"""Asking models of the user's own: what their forward names, and what they must not miss."""

import pytest
import torch
from torch import nn

from weft.config.model import ModelSection
from weft.errors import UserError
from weft.models.decoder import Decoder
from weft.models.forward import forward_of
from weft.models.initialize import initialize

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
def test_a_model_that_cannot_keep_documents_apart_is_reported(model):
    with pytest.raises(UserError, match=rf"{model.__name__}.forward .*segments.*data.document_attention to false"):
        forward_of(model())(INPUTS | {"segments": torch.ones(2, 5)})


def test_logits_are_divided_by_the_temperature():
    expected = (Logits()(TOKENS) / 0.7).log_softmax(-1).gather(-1, INPUTS["labels"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(forward_of(Logits())(INPUTS | {"temperature": 0.7}), expected)
    torch.testing.assert_close(forward_of(Labelled())(INPUTS | {"temperature": 1.0}), forward_of(Logits())(INPUTS))
    with pytest.raises(
        UserError, match=r"Labelled\.forward requires `labels` .*`temperature`.* 0\.7; add the argument"
    ):
        forward_of(Labelled())(INPUTS | {"temperature": 0.7})


@pytest.mark.parametrize("keys", [{}, {"logits_scaling": 2.0, "logit_softcap": 3.0}], ids=["plain", "soft-capped"])
def test_the_decoder_divides_logits_by_the_temperature(keys):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = Decoder(ModelSection.model_validate(sizes | {"vocab_size": 11, "initializer_range": 1.0} | keys)).double()
    initialize(model, 3)
    logits = model(TOKENS)
    assert logits.abs().max() > 2
    torch.testing.assert_close(model(TOKENS, temperature=0.7), logits / 0.7)
    expected = (logits / 0.7).log_softmax(-1).gather(-1, TOKENS.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model(TOKENS, labels=TOKENS, temperature=0.7), expected)


def test_a_model_gets_the_segments_that_it_names():
    call = forward_of(Apart())
    assert not torch.allclose(call(INPUTS), call(INPUTS | {"segments": torch.zeros(2, 5)}))


def test_a_model_of_logits_gets_a_function_of_them():
    def doubled(logits, tokens):
        return 2 * logits.flatten()[tokens.start * 11 : tokens.stop * 11].view(-1, 11)

    inputs = {"tokens": TOKENS, "logits_function": doubled}
    assert torch.equal(forward_of(Logits())(inputs), 2 * Logits()(TOKENS))
