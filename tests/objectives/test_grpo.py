"""GRPO and its variants against TRL's trainers and exact gradients, on packed answers of different lengths."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from weft.data.batches.given import batch_from
from weft.data.batches.layout import Layout
from weft.errors import UserError
from weft.objectives.grpo import GRPO

LENGTHS = (3, 7, 1, 5, 4, 6)  # of the answers: two groups of three
PROMPT, VOCABULARY, REWARDS = 2, 11, torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 2.0]])


def packed(objective, answers, sequences=2, **fields):
    """A batch of all answers, each with a prompt, in `sequences` sequences with padding, and its fields.

    Args:
        answers: log-probabilities of the tokens of each answer.
        fields: a number for each answer, or a tensor for each answer's tokens.

    Returns:
        The outputs of a model, `[sequences, seq]`, and the batch.
    """
    each, seq = len(answers) // sequences, 40
    rows = {name: torch.zeros(sequences, seq, dtype=torch.float64) for name in ("outputs", "weight", *fields)}
    segments = torch.zeros(sequences, seq, dtype=torch.int64)
    outputs = []
    for row in range(sequences):
        start, parts = 0, []
        for number in range(each):
            index = row * each + number
            length = len(answers[index])
            answer = slice(start + PROMPT, start + PROMPT + length)
            segments[row, start : answer.stop], rows["weight"][row, answer] = number, 1
            for name, values in fields.items():
                value = values[index]
                place = answer if getattr(value, "ndim", 0) else slice(start, answer.stop)
                rows[name][row, place] = torch.as_tensor(value, dtype=torch.float64)
            parts += [torch.zeros(PROMPT, dtype=torch.float64), answers[index]]
            start = answer.stop
        segments[row, start:] = each
        outputs.append(torch.cat([*parts, torch.zeros(seq - start, dtype=torch.float64)]))
    given = {"tokens": torch.zeros(sequences, seq, dtype=torch.int64), "labels": torch.ones(sequences, seq).long()}
    layout = Layout(objective.fields, weigh_documents=objective.weigh_documents)
    extra = {name: rows[name] for name in fields if name in objective.fields}
    batch = batch_from(given | {"segments": segments, "weight": rows["weight"]} | extra, layout)
    batch.extra |= {name: rows[name] for name in fields}  # what `prepare` adds, too
    return torch.stack(outputs), batch


def measure(objective, answers, logits, **fields):
    """The loss divided by its weight, its gradient for the logits, and the metrics."""
    outputs, batch = packed(objective, answers, **fields)
    found = objective.loss(outputs, batch)
    loss = found.sum / objective.weight(batch)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert found.scalars.keys() == set(objective.scalars)
    return loss.item(), gradient, {name: float(total / weight) for name, (total, weight) in found.scalars.items()}


@pytest.fixture(scope="module")
def sampled():
    """Logits of answers, the log-probabilities of their tokens, and those of three other models near by."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(sum(LENGTHS), VOCABULARY, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.randint(VOCABULARY, (sum(LENGTHS), 1), generator=generator)

    def others(scale):
        moved = logits.detach() + scale * torch.randn(logits.shape, dtype=torch.float64, generator=generator)
        return moved.log_softmax(-1).gather(1, ids).squeeze(1).split(LENGTHS)

    answers = logits.log_softmax(-1).gather(1, ids).squeeze(1).split(LENGTHS)
    return logits, answers, {"old_logprobs": others(0.3), "rollout_logprobs": others(0.4), "reference": others(1.0)}


def trl_loss(trainer, settings, answers, old, reference, advantage, importance):
    """The loss of a trainer of TRL, which gets only what its method for the loss reads."""
    pad = torch.nn.utils.rnn.pad_sequence
    logprobs = pad(answers, batch_first=True)
    mask = pad([torch.ones(length) for length in LENGTHS], batch_first=True)
    ids = torch.zeros(logprobs.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": ids[:, :PROMPT] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantage,
        "old_per_token_logps": pad(old, batch_first=True),
        "old_logps": torch.stack([one.sum() for one in old]),
        "ref_per_token_logps": pad(reference, batch_first=True),
        "importance_sampling_ratio": importance,
        "num_items_in_batch": mask.sum(),
    }
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, -logprobs.detach(), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        **dict.fromkeys(("aux_loss_enabled", "_entropy_bonus_enabled"), False),
        **{"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "current_gradient_accumulation_steps": 1},
        **{"vllm_importance_sampling_correction": True, "max_completion_length": 9, **settings},
    )
    return trainer._compute_loss(fake, None, inputs), fake._metrics["train"]


VARIANTS = {
    "grpo": {"loss_type": "grpo", "importance_sampling_level": "token"},
    "dr_grpo": {"loss_type": "dr_grpo", "importance_sampling_level": "token"},
    "dapo": {"loss_type": "dapo", "importance_sampling_level": "token"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "rloo": {},
}


def test_losses_gradients_and_metrics_are_those_of_trl(sampled):
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    logits, answers, others = sampled
    reference, compared = others["reference"], 0
    for loss, settings in VARIANTS.items():
        for off_policy, beta, cap in ((True, 0.0, None), (False, 0.3, None), (True, 0.3, None), (True, 0.0, 1.1)):
            if loss == "rloo" and (beta or cap is not None):
                continue  # TRL's RLOO has the KL in the reward, and no correction for the engine
            if loss == "gspo" and beta:
                continue  # TRL's GSPO weighs the KL of each token by the ratio of the answer: not the exact gradient
            common = {"loss": loss, "beta": beta, "clip": 0.15, "clip_high": 0.25, "max_new_tokens": 9}
            objective = GRPO(**common, importance_cap=cap, updates_per_rollout=2 if off_policy else 1)
            advantage = objective.advantages(REWARDS).flatten()
            old = others["old_logprobs"] if off_policy else [one.detach() for one in answers]
            fields = {"advantage": advantage, "reference_logprobs": reference, **others, "old_logprobs": old}
            found, gradient, metrics = measure(objective, answers, logits, **fields)
            # The correction of the engine's log-probabilities, per token or, for GSPO and RLOO, per answer
            gaps = [a - b for a, b in zip(old, others["rollout_logprobs"], strict=True)]
            per_answer = {"gspo": torch.mean, "rloo": torch.sum}.get(loss)
            gaps = [gap if per_answer is None else per_answer(gap).expand(len(gap)) for gap in gaps]
            importance = torch.nn.utils.rnn.pad_sequence(gaps, batch_first=True).exp().clamp(max=cap or 1.0)
            clips = {"epsilon_low": 0.15, "epsilon_high": 0.25, "beta": beta, "use_vllm": cap is not None}
            trainer = RLOOTrainer if loss == "rloo" else GRPOTrainer
            expected, logged = trl_loss(
                trainer, settings | clips, answers, old, reference, advantage, importance if cap else None
            )
            (expected_gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
            assert found == pytest.approx(expected.item(), rel=0, abs=1e-9), (loss, off_policy, beta, cap)
            assert gradient.abs().max() > 1e-3
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-9)
            if loss != "gspo" and loss != "rloo":  # TRL counts the clipped answers of these, Weft their tokens
                assert metrics["clip_fraction"] == pytest.approx(logged["clip_ratio/region_mean"][0], abs=1e-6)
            if beta:
                assert metrics["kl"] == pytest.approx(logged["kl"][0], abs=1e-6)
            compared += 1
    assert compared == 15


def test_advantages_are_differences_within_the_group(sampled):
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 2.0]])
    by_group = GRPO().advantages(rewards)
    centered = rewards.double() - rewards.double().mean(1, keepdim=True)
    torch.testing.assert_close(by_group[::2], (centered / rewards.double().std(1, keepdim=True))[::2])
    assert by_group[1].tolist() == [0, 0, 0, 0]  # and 0.1 has a rounding error, which would be divided by its own size
    torch.testing.assert_close(GRPO(loss="dr_grpo").advantages(rewards)[::2], centered[::2])
    torch.testing.assert_close(
        GRPO(normalize="batch").advantages(rewards)[::2], (centered / rewards.double().std())[::2]
    )
    others = torch.stack([rewards[2, [j for j in range(4) if j != i]].mean() for i in range(4)])
    torch.testing.assert_close(GRPO(loss="rloo").advantages(rewards)[2], (rewards[2] - others).double())
    for wrong in (torch.zeros(4, 1), torch.tensor([[0.0, torch.nan]])):
        with pytest.raises(Exception, match=r"2 or more per group|rewards of prompt 0"):
            GRPO().advantages(wrong)


@pytest.mark.parametrize("kind", ["group_std", "batch", "none"])
def test_small_differences_of_large_rewards_count(kind):
    rewards = torch.tensor([[1e6, 1e6 + 0.5], [1e6, 1e6]], dtype=torch.float64)
    centered = torch.tensor([-0.25, 0.25], dtype=torch.float64)
    divisor = {"group_std": centered.std(), "batch": rewards.std(), "none": 1.0}[kind]
    found = GRPO(normalize=kind).advantages(rewards)
    torch.testing.assert_close(found[0], centered / divisor)
    assert found[1].tolist() == [0, 0]
    # Equal rewards with the rounding of float32 (of float64, where it is not amplified) are equal.
    noise = 2.0**-23 if kind == "group_std" else 2.0**-50
    assert GRPO(normalize=kind).advantages(torch.tensor([[1, 1 + noise], [0, 0]], dtype=torch.float64)).eq(0).all()


def test_arguments_without_effect_are_refused():
    for arguments, key in (({"reference": "runs/x"}, "reference"), ({"kl": "k3"}, "kl")):
        with pytest.raises(UserError, match=rf"objective\.{key}: no effect with beta: 0; set beta, such as 0\.04"):
            GRPO(**arguments)
        assert GRPO(beta=0.1, **arguments).kl == "k3"


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_gradient_of_the_kl_is_exact_for_a_categorical_distribution(kind, off_policy):
    """The expectation over samples, as a sum over all tokens, of the gradient of the loss with advantage 0."""
    generator = torch.Generator().manual_seed(5)
    policy, reference, other = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    policy.requires_grad_()
    logprobs, reference = policy.log_softmax(0), reference.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, policy, retain_graph=True)
    sampler = other.log_softmax(0) if off_policy else logprobs.detach()
    objective = GRPO(beta=1.0, kl=kind, importance_cap=None, updates_per_rollout=2 if off_policy else 1)
    value, gradient = 0.0, torch.zeros_like(policy)
    for token in range(6):
        each = slice(token, token + 1)
        fields = {"advantage": [0.0], "old_logprobs": [sampler[each]], "reference_logprobs": [reference[each]]}
        outputs, batch = packed(objective, [logprobs[each]], 1, **fields)
        loss = objective.loss(outputs, batch).sum * sampler[token].exp()
        value += loss.item()
        gradient += torch.autograd.grad(loss, policy, retain_graph=True)[0]
    torch.testing.assert_close(gradient, exact_gradient, rtol=0, atol=1e-12)
    if kind != "k2":  # k2 is a biased estimate of the value
        assert value == pytest.approx(exact.item(), abs=1e-12)
    # Without the correction: k1 has no gradient, and k3 that of the reverse divergence.
    naive = (reference - logprobs).exp() - 1 + logprobs - reference
    (wrong,) = torch.autograd.grad((naive * sampler.exp()).sum(), policy)
    assert (wrong - exact_gradient).abs().max() > 1e-2


@pytest.mark.parametrize("loss", VARIANTS)
def test_the_loss_does_not_depend_on_packing_and_micro_batches(sampled, loss):
    logits, answers, others = sampled
    objective = GRPO(loss=loss, beta=0.2, clip_high=0.28, mask_truncated=True, updates_per_rollout=3)
    fields = {"advantage": objective.advantages(REWARDS).flatten(), "truncated": [0, 1, 0, 0, 0, 1]}
    fields |= {**others, "reference_logprobs": others["reference"]}
    expected, gradient, metrics = measure(objective, answers, logits, **fields)
    for sequences, size in ((1, 1), (2, 1), (6, 2), (6, 6)):
        outputs, batch = packed(objective, answers, sequences, **fields)
        parts = [
            objective.loss(outputs[a : a + size], part)
            for a, part in zip(range(0, sequences, size), batch.split(size), strict=True)
        ]
        total = sum(part.sum for part in parts) / objective.weight(batch)
        torch.testing.assert_close(
            torch.autograd.grad(total, logits, retain_graph=True)[0], gradient, rtol=0, atol=1e-12
        )
        assert total.item() == pytest.approx(expected, abs=1e-12)
        for name, value in metrics.items():
            sums = torch.tensor([[float(x) for x in part.scalars[name]] for part in parts]).sum(0)
            assert float(sums[0] / sums[1]) == pytest.approx(value, abs=1e-6)
    # Truncated answers have no gradient.
    moved = gradient.split(LENGTHS)
    assert [bool(part.abs().max() > 0) for part in moved] == [True, False, True, True, True, False]


def test_averages_do_not_count_truncated_answers_but_the_constant_of_dr_grpo_does(sampled):
    logits, answers, others = sampled
    fields = {"advantage": [1.0] * 6, "truncated": [0, 1, 0, 0, 0, 1], **others}
    weights = {}
    for loss in VARIANTS:
        objective = GRPO(loss=loss, mask_truncated=True, max_new_tokens=20)
        weights[loss] = objective.weight(packed(objective, answers, **fields)[1]).item()
    assert weights == pytest.approx({"grpo": 4, "dr_grpo": 6 * 20, "dapo": sum(LENGTHS) - 13, "gspo": 4, "rloo": 4})
    assert measure(GRPO(importance_cap=None), answers, logits, **fields)[0] == pytest.approx(-1, abs=1e-12)


def test_importance_is_capped_and_the_engine_is_compared(sampled):
    logits, answers, _ = sampled
    engine = [one.detach() - 3 for one in answers]  # the engine found each token e^3 times less likely
    fields = {"advantage": [1.0] * 6, "rollout_logprobs": engine}
    loss, gradient, metrics = measure(GRPO(), answers, logits, **fields)
    plain, plain_gradient, _ = measure(GRPO(importance_cap=None), answers, logits, **fields)
    assert loss == pytest.approx(2 * plain)
    torch.testing.assert_close(gradient, 2 * plain_gradient)
    assert metrics == pytest.approx(metrics | {"engine_deviation": 3.0, "importance_weight": 2.0, "ratio": 1.0})
