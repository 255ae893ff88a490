"""Compute-optimal sizes, beside what the papers say of their own laws."""

import pytest

from weft.errors import UserError
from weft.planner.budget import CHINCHILLA, REPLICATION, ParametricLaw, advice, optima, spread


def of(flops: float, law: str):
    return next(one for one in optima(flops) if one.law == law)


# Table 3 of Hoffmann et al.: FLOPs and tokens (billions) that are optimal for a number of parameters (billions).
@pytest.mark.parametrize(
    ("flops", "parameters", "tokens"),
    [(1.92e19, 0.4, 8.0), (1.21e20, 1, 20.2), (1.23e22, 10, 205.1), (5.76e23, 67, 1500), (9.9e24, 280, 5900)],
)
def test_the_first_approach_is_the_published_table(flops, parameters, tokens):
    found = of(flops, "chinchilla-1")
    assert found.parameters == pytest.approx(parameters * 1e9, rel=0.03)
    assert found.tokens == pytest.approx(tokens * 1e9, rel=0.08)  # the table is rounded: 6 N D is up to 7% off C


def test_llama_3_is_the_model_that_the_paper_derives():
    found = of(3.8e25, "llama-3")  # "a 402B parameter model on 16.55T tokens"
    assert found.parameters == pytest.approx(402e9, rel=0.05)
    assert found.tokens == pytest.approx(16.55e12, rel=0.05)


def test_the_replication_has_about_twenty_tokens_per_parameter_where_the_published_fit_has_seventy():
    budget = 5.76e23  # of Chinchilla itself
    assert 15 < of(budget, "replication").tokens_per_parameter < 26
    assert of(budget, "chinchilla-3").tokens_per_parameter > 60


# The models that DeepSeek trained by these rules: parameters, tokens, learning rate, tokens of a batch.
@pytest.mark.parametrize(
    ("parameters", "tokens", "rate", "batch"), [(6.9e9, 2e12, 4.2e-4, 2304 * 4096), (67e9, 2e12, 3.2e-4, 4608 * 4096)]
)
def test_deepseek_s_rules_give_the_settings_of_its_models(parameters, tokens, rate, batch):
    flops = 6 * parameters * tokens
    rule = next(one for one in advice(flops, parameters, tokens) if one.rule == "deepseek")
    assert rule.learning_rate == pytest.approx(rate, rel=0.03)
    assert rule.batch_tokens == pytest.approx(batch, rel=0.05)


def test_deepseek_s_sizes_multiply_to_the_budget():
    found = of(1e20, "deepseek")
    assert 6 * found.parameters * found.tokens == pytest.approx(1e20, rel=0.01)


@pytest.mark.parametrize("law", [CHINCHILLA, REPLICATION, ParametricLaw(2.0, 100.0, 300.0, 0.4, 0.3)])
def test_no_other_model_of_the_same_budget_has_a_lower_loss(law):
    flops = 1e22
    parameters, tokens = law.optimum(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert law.loss(parameters * factor, tokens / factor) > law.loss(parameters, tokens)


def test_laws_of_one_s_own_come_first_and_the_spread_is_that_of_the_trusted_laws():
    own = ParametricLaw(1.5, 400.0, 400.0, 0.34, 0.34)
    found = optima(1e22, own)
    assert found[0].law == "own"
    assert found[0].loss == pytest.approx(own.loss(found[0].parameters, found[0].tokens))
    least, most, mean = spread(found)
    assert least.parameters < mean < most.parameters
    assert "kaplan" not in (least.law, most.law)


@pytest.mark.parametrize("flops", [0, -1e20, 1e10, 1e40, float("nan")])
def test_absurd_budgets_are_refused(flops):
    with pytest.raises(UserError, match="--budget"):
        optima(flops)
