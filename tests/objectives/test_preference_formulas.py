"""The losses of preference objectives and their gradients are TRL's on the same logits, or the paper's formula."""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from preference_cases import answer_sums, documents, logprobs, packed, padded
from torch.nn.functional import logsigmoid

from weft.data.batches.layout import Layout
from weft.errors import UserError
from weft.objectives.dpo import DPO
from weft.objectives.kto import KTO
from weft.objectives.orpo import ORPO, log1mexp
from weft.objectives.reward import Reward
from weft.objectives.simpo import SimPO

WITHIN = 1e-6
FOUND = documents(10)
ROWS = [FOUND[:4], FOUND[4:6], FOUND[6:]]  # two pairs, one and two; the second row is mostly padding
CHOSEN, REJECTED = FOUND[::2], FOUND[1::2]


@pytest.fixture(autouse=True)
def gradients():
    for one in FOUND:
        one.logits = one.logits.detach().requires_grad_()
    yield
    for one in FOUND:
        one.logits = one.logits.detach()


def mean_loss(objective, batch, outputs=None):
    """The loss divided by the objective's weight, and the scalars."""
    found = objective.loss(logprobs(ROWS, batch) if outputs is None else outputs, batch)
    return found.sum / objective.weight(batch), {key: float(a / b) for key, (a, b) in found.scalars.items() if b}


def gradient(loss):
    found = torch.autograd.grad(loss, [one.logits for one in FOUND], retain_graph=True)
    return torch.cat([one.flatten() for one in found])


def with_reference(objective, batch):
    def forward(inputs, model=None):
        return logprobs(ROWS, batch, "reference" if model else "logits")

    return replace(batch, extra={**batch.extra, **objective.prepare(forward, batch)})


class Accelerator(SimpleNamespace):
    device = torch.device("cpu")

    def gather(self, values):
        return values

    gather_for_metrics = gather


class Outputs:
    """What TRL's fused head returns for the documents in `order`."""

    def __init__(self, order, name="logits", **inputs):
        labels, width = inputs["labels"][:, 1:], inputs["input_ids"].shape[1] - 1
        logits = torch.stack(
            [torch.nn.functional.pad(getattr(one, name), (0, 0, 0, width - len(one.ids) + 1)) for one in order]
        )
        found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        self.log_probs = found * (labels != -100)
        self.entropy = self.mean_logits = torch.zeros_like(self.log_probs)
        self.is_top1 = torch.zeros_like(labels, dtype=torch.bool)


def trl(**settings):
    """Attributes that the methods of TRL's trainers read."""
    common = {
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(),
        "args": SimpleNamespace(),
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
    }
    return SimpleNamespace(**common | settings)


def trl_dpo(kind, beta, smoothing=0.0):
    from trl.trainer.dpo_trainer import DPOTrainer

    order = CHOSEN + REJECTED
    reference = answer_sums(order, "reference")
    inputs = padded(order) | dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference.chunk(2), strict=True))
    trainer = trl(ld_alpha=None, f_divergence_type="reverse_kl", beta=beta, label_smoothing=smoothing)
    trainer.loss_types, trainer.loss_weights, trainer.use_weighting = [kind], [1.0], False
    loss = DPOTrainer._compute_loss(trainer, lambda **inputs: Outputs(order, **inputs), inputs, False)
    return loss, {key: value[-1] for key, value in trainer._metrics["train"].items()}


@pytest.mark.parametrize(
    ("keys", "theirs"),
    [
        ({}, ("sigmoid", 0.1)),
        ({"beta": 0.7, "length_normalized": True}, ("sigmoid_norm", 0.7)),
        ({"loss": "ipo", "beta": 0.3}, ("ipo", 0.3)),
        ({"loss": "robust", "beta": 0.5, "label_smoothing": 0.2}, ("robust", 0.5, 0.2)),
        ({"loss": "hinge", "beta": 0.2}, ("hinge", 0.2)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_dpo_is_trls(keys, theirs):
    objective = DPO(**keys)
    batch = with_reference(objective, packed(ROWS, 32))
    assert objective.weight(batch) == 5
    loss, scalars = mean_loss(objective, batch)
    expected, metrics = trl_dpo(*theirs)
    assert loss.item() == pytest.approx(expected.item(), abs=WITHIN)
    assert torch.allclose(gradient(loss), gradient(expected), rtol=0, atol=WITHIN)
    names = {"margin": "margins", "accuracy": "accuracies", "reward_chosen": "chosen", "reward_rejected": "rejected"}
    if objective.mean:  # TRL's metrics are those of sums, whatever the loss compares
        names = {}
    ours = {name: scalars[name] for name in names} | {name: scalars[name] for name in scalars if "logprob" in name}
    wanted = {name: metrics[f"rewards/{other}"] for name, other in names.items()}
    wanted |= {f"logprob_{one}": metrics[f"logps/{one}"] for one in ("chosen", "rejected")}
    assert ours == pytest.approx(wanted, abs=WITHIN)


def test_conservative_dpo_is_trls_formula():
    """TRL's DPO trainer has lost label smoothing; its CPO trainer has the same formula."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    objective = DPO(loss="cdpo", beta=0.4, label_smoothing=0.3)
    loss, _ = mean_loss(objective, with_reference(objective, packed(ROWS, 32)))
    ratios = [answer_sums(side) - answer_sums(side, "reference") for side in (CHOSEN, REJECTED)]
    trainer = trl(alpha=0.0, loss_type="sigmoid", beta=0.4, label_smoothing=0.3)
    expected = CPOTrainer.cpo_loss(trainer, *ratios)[0].mean()
    assert loss.item() == pytest.approx(expected.item(), abs=WITHIN)
    assert torch.allclose(gradient(loss), gradient(expected), rtol=0, atol=WITHIN)


@pytest.mark.parametrize("kind", ["sigmoid", "cdpo", "robust"])
def test_the_first_loss_of_dpo_is_ln_2(kind):
    objective = DPO(loss=kind, label_smoothing=0.0 if kind == "sigmoid" else 0.1)
    batch = packed(ROWS, 32)
    batch.extra["reference"] = objective.prepare(lambda _, model=None: logprobs(ROWS, batch), batch)["reference"]
    assert mean_loss(objective, batch)[0].item() == pytest.approx(math.log(2), abs=WITHIN)


def test_the_additional_loss_of_dpo_is_the_mean_per_token_of_chosen_answers():
    """As in the paper of RPO. TRL's `sft` is a mean over the tokens of a micro-batch, which depends on its size."""
    batch = with_reference(DPO(), packed(ROWS, 32))
    plain, more = (mean_loss(DPO(sft_weight=weight), batch)[0] for weight in (0.0, 0.3))
    assert (more - plain).item() == pytest.approx(-0.3 * answer_sums(CHOSEN, mean=True).mean().item(), abs=WITHIN)


@pytest.mark.parametrize("keys", [{"loss": "cdpo"}, {"loss": "sigmoid", "label_smoothing": 0.1}])
def test_label_smoothing_without_effect_is_refused(keys):
    with pytest.raises(UserError, match="label_smoothing"):
        DPO(**keys)


def test_simpo_is_trls():
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    batch = packed(ROWS, 32)
    loss, scalars = mean_loss(SimPO(beta=2.5, gamma=1.2), batch)
    trainer = trl(alpha=0.0, loss_type="simpo", simpo_gamma=1.2, beta=2.5, label_smoothing=0.0)
    losses, chosen, rejected = CPOTrainer.cpo_loss(
        trainer, *(answer_sums(one, mean=True) for one in (CHOSEN, REJECTED))
    )
    assert loss.item() == pytest.approx(losses.mean().item(), abs=WITHIN)
    assert torch.allclose(gradient(loss), gradient(losses.mean()), rtol=0, atol=WITHIN)
    assert scalars["margin"] == pytest.approx((chosen - rejected).mean().item(), abs=WITHIN)


def test_orpo_is_trls_term_and_the_papers_likelihood():
    """TRL's first term also has the tokens of prompts, as a mean over the micro-batch; the paper's has the answer's."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    batch = packed(ROWS, 32)
    loss, scalars = mean_loss(ORPO(beta=0.6), batch)
    means = [answer_sums(one, mean=True) for one in (CHOSEN, REJECTED)]
    terms = ORPOTrainer.odds_ratio_loss(trl(beta=0.6), *means)[0]
    expected = -means[0].mean() - terms.mean()
    assert loss.item() == pytest.approx(expected.item(), abs=WITHIN)
    assert torch.allclose(gradient(loss), gradient(expected), rtol=0, atol=WITHIN)
    assert scalars["nll"] == pytest.approx(-means[0].mean().item(), abs=WITHIN)


def test_odds_of_certain_answers_are_finite():
    x = torch.tensor([0.0, -1e-300, -1e-9, -0.5, -800.0], dtype=torch.float64)
    expected = [math.log(2**-52)] * 2 + [math.log(1e-9), math.log(1 - math.exp(-0.5)), 0.0]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-9)


def trl_kto(beta, desirable, undesirable, labels, partners):
    from trl.trainer.kto_trainer import KTOTrainer

    order, mixed = FOUND, partners
    inputs = padded(order) | {f"KL_{key}": value for key, value in padded(mixed).items()} | {"label": labels}
    inputs["ref_logps"] = answer_sums(order, "reference")
    inputs["ref_KL_logps"] = answer_sums(mixed, "reference")
    trainer = trl(calculate_KL=True, loss_type="kto", beta=beta)
    trainer.desirable_weight, trainer.undesirable_weight = desirable, undesirable

    def model(**given):
        return Outputs(mixed if given["input_ids"] is inputs["KL_input_ids"] else order, **given)

    trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
    loss = KTOTrainer._compute_loss(trainer, model, inputs, False)
    return loss, {key: value[-1] for key, value in trainer._metrics["train"].items()}


@pytest.mark.parametrize("shift", [-3.0, 3.0], ids=["clamped", "positive"])
def test_kto_is_trls_with_the_kl_of_the_global_batch(shift):
    """TRL estimates the KL for the micro-batch of a rank, so its loss depends on micro-batches; here they are two."""
    partners = [type(one)(one.prompt, row[(k + 1) % len(row)].answer) for row in ROWS for k, one in enumerate(row)]
    for one in partners:
        one.reference = one.logits - 0.1 * shift * torch.nn.functional.one_hot(
            torch.tensor(one.ids[1:]), one.logits.shape[-1]
        )
    labels = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
    values = [labels[:4].tolist(), labels[4:6].tolist(), labels[6:].tolist()]
    objective = KTO(beta=0.5, desirable_weight=1.3, undesirable_weight=0.8)
    whole = packed(ROWS, 32, Layout(objective.fields), label=values)
    mixed_rows = [partners[:4], partners[4:6], partners[6:]]

    micro_batches, prepared = whole.split(2), []
    for number, batch in enumerate(micro_batches):
        rows = slice(2 * number, 2 * number + 2)

        def forward(inputs, model=None, batch=batch, rows=rows):
            which = ROWS if torch.equal(inputs["tokens"], batch.tokens) else mixed_rows
            aligned = replace(batch, labels=inputs["labels"])
            return logprobs(which[rows], aligned, "reference" if model else "logits")

        with torch.no_grad():
            prepared.append(objective.prepare(forward, batch))
    objective.combine(prepared, lambda total: total)

    expected, metrics = trl_kto(0.5, 1.3, 0.8, labels, partners)
    sums, scalars = [], defaultdict(lambda: [0.0, 0.0])
    for number, batch in enumerate(micro_batches):
        batch = replace(batch, extra={**batch.extra, **prepared[number]})
        found = objective.loss(logprobs(ROWS[2 * number : 2 * number + 2], batch), batch)
        sums.append(found.sum)
        for key, pair in found.scalars.items():
            scalars[key] = [a + float(b) for a, b in zip(scalars[key], pair, strict=True)]
    loss = sum(sums) / objective.weight(whole)
    assert (metrics["kl"] > 0.1) == (shift > 0)
    assert scalars["kl"][0] / 10 == pytest.approx(metrics["kl"], abs=WITHIN)
    assert loss.item() == pytest.approx(expected.item(), abs=WITHIN)
    assert torch.allclose(gradient(loss), gradient(expected), rtol=0, atol=WITHIN)
    for one in ("chosen", "rejected"):
        assert scalars[f"reward_{one}"][0] / scalars[f"reward_{one}"][1] == pytest.approx(metrics[f"rewards/{one}"])


@pytest.mark.parametrize(("margin", "center"), [(False, 0.0), (True, 0.01)])
def test_the_loss_of_a_reward_model_is_trls(margin, center):
    from trl.trainer.reward_trainer import RewardTrainer

    objective = Reward(margin=margin, center=center)
    margins = [[0.5, 0.5, 1.0, 1.0], [0.0, 0.0], [2.0, 2.0, 0.25, 0.25]]
    batch = packed(ROWS, 32, Layout(objective.fields), **({"margin": margins} if margin else {}))
    outputs = torch.randn(batch.tokens.shape, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
    last = [
        (row, sum(len(one.ids) - 1 for one in found[: k + 1]) - 1)
        for row, found in enumerate(ROWS)
        for k in range(len(found))
    ]
    scores = torch.stack([outputs[place] for place in last])
    inputs = padded(FOUND)
    if margin:
        inputs["margin"] = torch.tensor([one for row in margins for one in row[::2]])
    logits = torch.cat((scores[::2], scores[1::2])).unsqueeze(-1)
    trainer = trl(args=SimpleNamespace(center_rewards_coefficient=center or None))
    expected = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs)
    loss, scalars = mean_loss(objective, batch, outputs)
    assert loss.item() == pytest.approx(expected.item(), abs=WITHIN)
    ours, theirs = (torch.autograd.grad(one, outputs, retain_graph=True)[0] for one in (loss, expected))
    assert torch.allclose(ours, theirs, rtol=0, atol=WITHIN)
    metrics = trainer._metrics["train"]
    assert [scalars["margin"], scalars["accuracy"]] == pytest.approx([metrics["margin"][0], metrics["accuracy"][0]])
    if not margin:
        assert loss.item() == pytest.approx(-logsigmoid(scores[::2] - scores[1::2]).mean().item())
