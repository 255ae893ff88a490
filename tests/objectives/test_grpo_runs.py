"""GRPO in training runs: the first loss is 0, and on the policy that sampled every ratio is 1."""

import numpy as np
import pytest
import torch

import weft
from weft.generation.sampler import probabilities
from weft.generation.settings import Sampling
from weft.objectives.grpo import GRPO

PROMPT, LENGTH, GROUP = 3, 12, 4
SETTINGS = {
    "data": {"train": None, "validation": None, "sequence_length": LENGTH},
    "training": {"steps": None, "batch_tokens": None, "micro_batch_size": 3},
    "schedule": {"type": "constant"},
    "checkpoint": {"every": None},
    "log": {"trackers": []},
}


def sample(model, objective, rewards, temperature, top_p=None):
    """Answers to two prompts, drawn from the model with all that Transformers would divide and drop; a batch of them.

    Returns:
        The batch, and the sums of the probabilities that top_p kept, `[sequences, seq]`.
    """
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(512, (2, PROMPT), generator=draw).repeat_interleave(GROUP, 0)
    logprobs, mass = torch.zeros(2 * GROUP, LENGTH), torch.ones(2 * GROUP, LENGTH)
    with torch.no_grad():
        for place in range(PROMPT - 1, LENGTH - 1):
            logits = model(tokens)[:, -1]
            kept = probabilities(logits, Sampling(1, temperature, top_p=top_p))
            new = kept.multinomial(1, generator=draw)
            full = (logits / temperature).softmax(-1)
            logprobs[:, place], mass[:, place] = full.gather(1, new).log()[:, 0], (full * (kept > 0)).sum(1)
            tokens = torch.cat((tokens, new), 1)
    weight = np.zeros(tokens.shape, np.float32)
    weight[:, PROMPT - 1 : -1] = 1
    batch = {"tokens": tokens, "weight": weight, "advantage": objective.advantages(rewards).flatten()}
    return batch | {"rollout_logprobs": logprobs}, mass


@pytest.fixture
def trainer(run_yaml):
    def open_trainer(**objective):
        config = weft.RunConfig.load(run_yaml(**SETTINGS, objective={"type": "grpo", **objective}))
        return weft.Trainer(config, batches="global", fresh=True)

    return open_trainer


REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.5, 0.0]])


def test_the_loss_of_the_first_update_is_0_and_its_gradient_is_not(trainer):
    with trainer(importance_cap=None, beta=0.5) as run:
        batch, _ = sample(run.model, GRPO(), REWARDS, 1.0)
        batch.pop("rollout_logprobs")
        metrics = run.step(batch)
        later = run.step(batch)
    assert metrics["loss"] == pytest.approx(0, abs=1e-15)
    assert metrics["grad_norm"] > 0.01
    assert metrics["kl"] == 0  # the reference is the model as the run starts
    assert later["kl"] > 1e-4
    assert later["loss"] == pytest.approx(0.5 * later["kl"], rel=1e-6)  # answers are equally long, and ratios are 1
    assert (metrics["ratio"], metrics["clip_fraction"]) == (1, 0)
    assert metrics["entropy"] == pytest.approx(np.log(512), rel=0.1)


def test_ratios_on_the_policy_that_sampled_are_1_at_any_temperature_and_top_p(trainer):
    with trainer(temperature=0.7, updates_per_rollout=2, normalize="none") as run:
        batch, mass = sample(run.model, GRPO(normalize="none"), REWARDS, 0.7, top_p=0.9)
        with torch.no_grad():
            inputs = {"tokens": batch["tokens"], "labels": batch["tokens"].roll(-1, 1), "temperature": 0.7}
            batch["old_logprobs"] = run.model(**inputs)
        leaks = {**batch, "rollout_logprobs": batch["rollout_logprobs"] - mass.log()}  # renormalized by top_p
        first, second, leaked = run.step(batch), run.step(batch), run.step(leaks)
    assert first["ratio"] == 1
    assert first["clip_fraction"] == 0
    assert first["loss"] == pytest.approx(0, abs=1e-6)
    assert first["engine_deviation"] < 1e-5
    assert first["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert leaked["importance_weight"] < 0.97  # what was dropped counts as a difference of trainer and engine
    assert second["ratio"] != 1
