"""Models with a scalar head: Transformers' scores, in and out, and a new head on a model that predicts tokens."""

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import weft
from weft.errors import UserError

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
MODELS = {
    LlamaForSequenceClassification: LlamaConfig(**SIZES, **TOKENS, tie_word_embeddings=True, num_labels=1),
    Gemma3TextForSequenceClassification: Gemma3TextConfig(
        **SIZES, **TOKENS, num_key_value_heads=2, head_dim=8, num_labels=1
    ),
    GPT2ForSequenceClassification: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **TOKENS, num_labels=1),
}
IDS = torch.randint(1, 64, (3, 9), generator=torch.manual_seed(0))


@pytest.fixture
def save(tmp_path):
    def made(kind, config=None):
        torch.manual_seed(1)
        theirs = kind(config or MODELS[kind]).eval()
        theirs.save_pretrained(tmp_path / "theirs")
        return theirs, tmp_path / "theirs"

    return made


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_scores_are_transformers_before_and_after_an_export(save, tmp_path, kind):
    theirs, folder = save(kind)
    expected = theirs(IDS).logits[:, 0]
    assert expected.std() > 0.01
    model = weft.load_model(folder)
    scores = model(IDS)
    assert scores.shape == IDS.shape
    torch.testing.assert_close(scores[:, -1], expected, rtol=1e-4, atol=1e-5)
    weft.export_model(folder, tmp_path / "ours")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert type(again) is kind
    again.config.pad_token_id = 0
    assert torch.equal(again(IDS).logits[:, 0], expected)
    torch.testing.assert_close(weft.load_model(folder, quantize="int8")(IDS)[:, -1], expected, rtol=0, atol=0.05)


def test_a_classifier_of_several_labels_is_refused(save):
    _, folder = save(LlamaForSequenceClassification, LlamaConfig(**SIZES, **TOKENS))
    with pytest.raises(UserError, match=r"config\.json.*a classifier with 2 labels is not supported"):
        weft.load_model(folder)


def test_a_reward_model_neither_generates_nor_has_a_perplexity(save, tiny_heldout):
    _, folder = save(LlamaForSequenceClassification, LlamaConfig(**SIZES | {"vocab_size": 512}, **TOKENS, num_labels=1))
    with pytest.raises(UserError, match="reward model"):
        weft.Engine(weft.load_model(folder))
    with pytest.raises(UserError, match="reward model"):
        weft.evaluate(folder, store=tiny_heldout)


def test_a_family_without_reward_models_in_transformers_is_named(tmp_path):
    section = {"family": "granite", "num_labels": 1, **{key: SIZES[key] for key in SIZES}}
    from weft.config.model import ModelSection
    from weft.models.huggingface_weights import to_config_json

    with pytest.raises(UserError, match=r"Transformers has no reward models of the family granite"):
        to_config_json(ModelSection(**section))
