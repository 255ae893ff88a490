"""Generation with the adapter of a run: in one process, and sharded over `tp`."""

import pytest
import torch
from generation_parts import added_on_one_rank, pieces, sharded
from matrix import Case

import weft
from weft.generation.engine import Engine

pytestmark = pytest.mark.xdist_group("ranks")
PROMPTS = [[5], list(range(30)), [7, 8, 9]]


def greedy(model, prompt, tokens):
    """The next tokens by full forward passes, without a cache."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("model", "way"), [("deepseek_v3", "lora_experts"), pytest.param("gqa", "qlora", marks=pytest.mark.matrix)]
)
def test_an_adapters_run_generates_the_same_on_two_ranks(runner, model, way):
    run = runner.reference(Case(model, way, layers=2), steps=2)
    found = runner.pool.call(sharded, 2, [run.path], PROMPTS, {}, seconds=120)
    assert found[0] == found[1]
    loaded = weft.load_model(run.path)
    expected = pieces(Engine(loaded, max_cache_tokens=800), PROMPTS)
    for ours, one in zip(found[0][0][0], expected, strict=True):
        assert [token for token, *_ in ours] == [token for token, *_ in one]
    for prompt, one in zip(PROMPTS, expected, strict=False):
        assert [token for token, *_ in one] == greedy(loaded, prompt, 6)


def test_one_rank_alone_adds_an_adapter_and_checks_its_base_model(runner):
    run = runner.reference(Case("dense", "lora", layers=2), steps=2)
    base = weft.RunConfig.load(run.path / "config.yaml", check_data=False).model.from_
    found = runner.pool.call(added_on_one_rank, 2, base, run.path)
    assert found == [[], greedy(weft.load_model(run.path), [5, 6, 7], 6)]
