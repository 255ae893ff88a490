"""The distillation loss: PyTorch's and TRL's divergences, and gradients of the naive formula."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from weft.data.batches.layout import Layout
from weft.errors import UserError
from weft.objectives import Batch
from weft.objectives.distill import Distill, divergence

torch.manual_seed(0)
VOCAB, SHAPE = 19, (2, 5)
STUDENT, TEACHER = (3 * torch.randn(*SHAPE, VOCAB, dtype=torch.float64) for _ in range(2))
LABELS = torch.randint(VOCAB, SHAPE)
WEIGHT = torch.tensor([[1, 1, 0, 0.5, 1], [0, 0, 1, 1, 0]])
KINDS = {"forward": 0.0, "reverse": 1.0, "jsd": 0.3}  # and TRL's beta
BATCH = Batch(LABELS, LABELS, WEIGHT, torch.arange(5).expand(SHAPE), None, torch.arange(2))


def run_model(inputs, logits):
    """What a model with given logits returns."""
    function = inputs.get("logits_function")
    return logits if function is None else function(logits.flatten(0, 1), slice(0, 10)).unflatten(0, SHAPE)


def loss_of(objective, student=STUDENT, teacher=TEACHER, batch=BATCH):
    """The objective's `Loss` for given logits of student and teacher."""
    extra = objective.prepare(lambda inputs, model: run_model(inputs, {"teacher": teacher}[model]), batch)
    batch = replace(batch, extra=extra)
    return objective.loss(run_model(objective.inputs(batch), student), batch)


def distill(loss="forward", **arguments):
    return Distill(teacher="t", loss=loss, **({"beta": KINDS[loss]} if loss == "jsd" else {}), **arguments)


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences_are_those_of_trl(loss, temperature):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    labels = LABELS.where(WEIGHT > 0, -100)
    wanted = GKDTrainer.generalized_jsd_loss(STUDENT, TEACHER, labels, KINDS[loss], temperature, "sum")
    found = loss_of(distill(loss, temperature=temperature), batch=replace(BATCH, weight=(WEIGHT > 0).float()))
    assert found.sum.item() == pytest.approx(temperature**2 * wanted.item(), abs=1e-6, rel=0)
    assert found.scalars["divergence"][0].item() == pytest.approx(wanted.item(), abs=1e-6, rel=0)


@pytest.mark.parametrize("top_k", [None, VOCAB, VOCAB + 5, 4])
@pytest.mark.parametrize("loss", KINDS)
def test_value_and_gradient_are_those_of_the_naive_formula(loss, top_k):
    alpha, temperature = 0.3, 2.0
    found_input, naive_input = STUDENT.clone().requires_grad_(), STUDENT.clone().requires_grad_()
    found = loss_of(distill(loss, alpha=alpha, temperature=temperature, top_k=top_k), found_input)
    p, q = TEACHER.softmax(-1), naive_input.softmax(-1)
    if top_k == 4:  # four probabilities and the rest, then the temperature
        ids = p.argsort(-1, descending=True)
        p, q = (torch.cat((x.gather(-1, ids)[..., :4], x.gather(-1, ids)[..., 4:].sum(-1, True)), -1) for x in (p, q))
    p, q = (x ** (1 / temperature) / (x ** (1 / temperature)).sum(-1, keepdim=True) for x in (p, q))
    m = KINDS[loss] * p + (1 - KINDS[loss]) * q
    kl = {
        "forward": lambda: (p * (p / q).log()).sum(-1),
        "reverse": lambda: (q * (q / p).log()).sum(-1),
        "jsd": lambda: (0.3 * p * (p / m).log() + 0.7 * q * (q / m).log()).sum(-1),
    }[loss]()
    ce = F.cross_entropy(naive_input.flatten(0, 1), LABELS.flatten(), reduction="none").view(SHAPE)
    naive = ((alpha * ce + (1 - alpha) * temperature**2 * kl) * WEIGHT).sum()
    (found_gradient,), (gradient,) = (torch.autograd.grad(*x) for x in ((found.sum, found_input), (naive, naive_input)))
    assert found.sum.item() == pytest.approx(naive.item(), abs=1e-9)
    torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-9)
    assert found.scalars["cross_entropy"][0].item() == pytest.approx((ce * WEIGHT).sum().item())
    assert found.scalars["divergence"][1].item() == 5.5
    assert not found_gradient[WEIGHT == 0].any()  # masked tokens and padding


def test_more_tokens_tell_apart_more():
    values = [loss_of(distill(top_k=k)).sum.item() for k in (1, 3, 9, VOCAB)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(loss_of(distill()).sum.item(), abs=1e-12)


def test_the_student_learns_the_teacher_at_the_same_position():
    """Equal logits have divergence 0; logits shifted by a token do not."""
    assert loss_of(distill(), TEACHER).sum.item() == pytest.approx(0, abs=1e-12)
    assert loss_of(distill(), TEACHER.roll(1, 1)).sum.item() > 1


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_logits_have_no_negative_divergence(kind):
    """Nearly equal distributions of a large vocabulary, from bfloat16 logits; and certain ones."""
    teacher = torch.randn(400, 4000).bfloat16()
    student = (teacher + 1e-2 * torch.randn(400, 4000)).bfloat16()
    certain = torch.full((1, 4000), -1e4).scatter(1, torch.tensor([[7]]), 0.0)
    for p, q in ((teacher, student), (teacher, teacher), (certain, certain)):
        found = divergence(p.float().log_softmax(-1), q.float().log_softmax(-1), kind=kind, beta=0.5)
        assert (found >= 0).all()
        assert found.isfinite().all()
    assert math.isclose(found.item(), 0, abs_tol=1e-6)


def test_beta_without_jsd_is_refused():
    with pytest.raises(UserError, match=r"objective\.beta: .*loss: forward; remove it, or set loss: jsd"):
        Distill(teacher="t", beta=0.5)


@pytest.mark.parametrize("top_k", [None, 4, VOCAB])
def test_rows_of_a_head_that_are_no_tokens_of_the_other_model_are_left_out(top_k):
    batch = replace(BATCH, layout=Layout(vocab_size=VOCAB))
    more = torch.cat((TEACHER, torch.full((*SHAPE, 3), 9.0)), -1)
    wanted = loss_of(distill(top_k=top_k), batch=batch).sum.item()
    assert loss_of(distill(top_k=top_k), teacher=more, batch=batch).sum.item() == pytest.approx(wanted, abs=1e-9)
    if top_k is None:
        student = torch.cat((STUDENT, torch.full((*SHAPE, 3), 9.0)), -1)
        batch = replace(BATCH, layout=Layout(vocab_size=VOCAB + 3))
        assert loss_of(distill(), student, batch=batch).sum.item() == pytest.approx(wanted, abs=1e-9)
