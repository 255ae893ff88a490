"""Embeddings equal the pooled hidden states of Transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM

import weft
from weft.config.transformers_model import TransformersModelSection
from weft.errors import UserError
from weft.generation.adapters import Adapters
from weft.generation.embeddings import embed
from weft.models.transformers_model import build_transformers_model

IDS = [5, 17, 301, 44, 8, 8, 93]


def test_embeddings_are_those_of_transformers(hf_folder, tmp_path):
    config = GPTJConfig(vocab_size=512, n_positions=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8)
    section = TransformersModelSection(type="hf", path=str(tmp_path), weights=False, config=config.to_dict())
    gptj = build_transformers_model(section, seed=1).eval()
    reference = GPTJForCausalLM(config).eval()
    reference.load_state_dict(gptj.state_dict())
    llama = AutoModelForCausalLM.from_pretrained(hf_folder)
    for model, theirs in ((gptj, reference), (weft.load_model(hf_folder), llama)):
        with torch.no_grad():
            hidden = theirs(torch.tensor([IDS]), output_hidden_states=True).hidden_states[-1][0]
        for pooling, expected in (("mean", hidden.mean(0)), ("last", hidden[-1])):
            ours = torch.tensor(embed(model, IDS, pooling))
            torch.testing.assert_close(ours, expected / expected.norm(), rtol=1e-5, atol=1e-6)


def test_an_adapter_changes_embeddings(hf_folder):
    model = weft.load_model(hf_folder)
    adapters, layer = Adapters(), "layers.0.attention.q_proj"
    weight = model.get_submodule(layer).weight
    a, b = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
    adapters.add(model, "one", {layer: weft.LowRank(a, b, 0.5)})
    adapted = embed(model, IDS, "last", adapters.get("one"))
    assert adapted != embed(model, IDS, "last")
    with torch.no_grad():
        weight += 0.5 * b @ a
    torch.testing.assert_close(embed(model, IDS, "last"), adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("ids", "said"), [([], "no tokens"), ([512], "512.*0 to 511")])
def test_texts_that_have_no_embedding_are_refused(hf_folder, ids, said):
    with pytest.raises(UserError, match=said):
        embed(weft.load_model(hf_folder), ids, "mean")
