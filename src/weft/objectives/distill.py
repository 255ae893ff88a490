"""Knowledge distillation: the student learns the teacher's distribution of the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt

from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.parallel.objective import Forward, Loss, Objective


class Distill(Objective):
    """The divergence between the teacher's and the student's next-token distributions at the learned tokens.

    The loss of a token is alpha * cross-entropy + (1 - alpha) * temperature^2 * divergence. Both distributions are
    softmax(logits / temperature) in the divergence; the factor temperature^2 keeps its gradients of the same size
    (Hinton et al., 2015). The cross-entropy of the label has temperature 1. All are computed in float32 (float64 in
    float64 runs), for chunks of tokens. The metrics have the means `cross_entropy` and `divergence`; the latter is
    without the factor.

    With `hidden_weight`, hidden_weight * distance of hidden states is added, as in TinyBERT (Jiao et al., 2020). If the
    sizes of the hidden states differ, the student's are multiplied by a matrix that is trained with the student. It is
    in the run's checkpoints, but not in the model that is exported. The metric `hidden_loss` is the mean distance.

    Args:
        teacher: a run, a checkpoint or a Hugging Face folder, with the vocabulary of the student. The teacher is not
            trained, and is sharded over the mesh of the student.
        loss: the divergence of the student's distribution q from the teacher's p. `forward`: KL(p || q); q covers all
            that is likely for the teacher. `reverse`: KL(q || p); q avoids what is unlikely for the teacher (Gu et al.,
            2023). `jsd`: the generalized Jensen-Shannon divergence beta KL(p || m) + (1 - beta) KL(q || m), where
            m = beta p + (1 - beta) q (Agarwal et al., 2023).
        temperature: divisor of the logits in the divergence; above 1, unlikely tokens count more.
        top_k: number of the teacher's most likely tokens. Both distributions are reduced to these tokens and one more
            outcome, which has the probability of all other tokens. The temperature applies to the reduced
            distributions. None: all tokens, which needs memory for the teacher's logits.
        alpha: weight of the cross-entropy, from 0 to 1.
        beta: weight of the teacher in `jsd`, above 0 and below 1; None: 0.5. Not for other losses.
        cache_teacher: whether the teacher's `top_k` log-probabilities are computed once for all sequences, before the
            training. They stay in the cache folder, with 8 k bytes per token, for further runs with the same data, also
            with another temperature. The teacher is not in memory in training. Not for custom datasets.
        hidden_weight: weight of the distance of hidden states; 0: they are not compared. Not with `parallel.pp`.
        hidden_layers: pairs [student's hidden state, teacher's hidden state], such as [[4, 8], [8, 16]]. The distances
            of all pairs are averaged. State 0 is the embedding, N the output of layer N, and the last is after the
            final norm, as in Transformers; -1 is the last. None: [[-1, -1]].
        hidden_loss: distance of the states of a token. `mse`: mean of the squared differences; `cosine`: 1 - cosine of
            the angle, which ignores lengths.
    """

    scalars = ("cross_entropy", "divergence")

    def __init__(
        self,
        *,
        teacher: str,
        loss: Literal["forward", "reverse", "jsd"] = "forward",
        temperature: Annotated[float, Gt(0)] = 1.0,
        top_k: Annotated[int, Ge(1)] | None = None,
        alpha: Annotated[float, Ge(0), Le(1)] = 0.0,
        beta: Annotated[float, Gt(0), Lt(1)] | None = None,
        cache_teacher: bool = False,
        hidden_weight: Annotated[float, Ge(0)] = 0.0,
        hidden_layers: list[list[int]] | None = None,
        hidden_loss: Literal["mse", "cosine"] = "mse",
    ):
        if beta is not None and loss != "jsd":
            raise UserError(f"objective.beta: it is not used by loss: {loss}; remove it, or set loss: jsd")
        if cache_teacher and top_k is None:
            raise UserError(
                "objective.cache_teacher: all probabilities of all tokens are too many; set top_k, such as 64"
            )
        if cache_teacher and hidden_weight:
            raise UserError(
                "objective.cache_teacher: the teacher's hidden states are too many to be cached (4 bytes for each "
                "dimension and token); remove this key, or hidden_weight"
            )
        if (hidden_layers is not None or hidden_loss != "mse") and not hidden_weight:
            raise UserError("objective.hidden_weight: 0, so hidden states are not compared; set it, such as 1.0")
        self.hidden_weight, self.hidden_loss = hidden_weight, hidden_loss
        self.hidden_layers = _pairs(hidden_layers or [[-1, -1]]) if hidden_weight else {}
        if hidden_weight:
            self.scalars = (*self.scalars, "hidden_loss")
        self.frozen_models, self.cache_prepare = {"teacher": teacher}, None
        if cache_teacher:
            self.cache_prepare = {"objective": "distill", "top_k": top_k}
        self.temperature, self.top_k, self.alpha = temperature, top_k, alpha
        self.divergence = partial(divergence, kind=loss, beta=0.5 if beta is None else beta)

    def prepare(self, forward: Forward, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns the teacher's logits `[batch, seq, vocab]` as `teacher`.

        With `top_k`, `teacher` is the reduced log-probabilities `[batch, seq, top_k + 1]`, and `teacher_ids` the ids of
        the most likely tokens, int32 `[batch, seq, top_k]`. Logits beyond the student's vocabulary are omitted.
        With `hidden_weight`, `teacher_hidden.N` is hidden state N of the teacher, `[batch, seq, hidden]`.
        """
        inputs, vocab = _inputs(batch), batch.layout.vocab_size
        if self.top_k is not None:
            inputs["logits_function"] = partial(most_likely, k=self.top_k, vocab=vocab)
        hidden: dict[str, torch.Tensor] = {}
        if self.hidden_layers:
            inputs["hidden_functions"] = {n: partial(_keep, hidden, n) for n in self.hidden_layers.values()}
        found = forward(inputs, model="teacher")
        if self.top_k is None:
            return {"teacher": found[..., :vocab], **hidden}
        k = found.shape[-1] // 2
        return {"teacher": found[..., : k + 1].contiguous(), "teacher_ids": found[..., k + 1 :].int(), **hidden}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns the student's arguments. Its outputs are the arguments of `loss`."""
        per_token = {
            name: batch.extra[name].flatten(0, 1) for name in ("teacher", "teacher_ids") if name in batch.extra
        }
        inputs = _inputs(batch) | {"logits_function": partial(self.losses, batch.labels.flatten(), per_token)}
        if self.hidden_layers:
            inputs["hidden_functions"] = {
                mine: partial(distance, batch.extra[f"teacher_hidden.{other}"], kind=self.hidden_loss)
                for mine, other in self.hidden_layers.items()
            }
        return inputs

    def losses(
        self, labels: torch.Tensor, teacher: Mapping[str, torch.Tensor], logits: torch.Tensor, tokens: slice
    ) -> torch.Tensor:
        """Returns the cross-entropy and the divergence of each token, `[n, 2]`.

        Args:
            labels: `[batch x seq]`.
            teacher: what `prepare` returned, for flattened tokens.
            logits: the student's logits of some tokens, `[n, vocab]`.
            tokens: these tokens, as a slice of the flattened tokens.
        """
        student = logits.log_softmax(-1)
        cross_entropy = -student.gather(-1, labels[tokens].unsqueeze(-1)).squeeze(-1)
        target, is_reduced = teacher["teacher"][tokens].to(student.dtype), "teacher_ids" in teacher
        if is_reduced:
            student = reduced(student, teacher["teacher_ids"][tokens].long())
        elif target.shape[-1] < student.shape[-1]:  # the student's head has rows that are no tokens
            student = student[:, : target.shape[-1]].log_softmax(-1)
        if self.temperature != 1.0:
            student = (student / self.temperature).log_softmax(-1)
        if self.temperature != 1.0 or not is_reduced:
            target = (target / self.temperature).log_softmax(-1)
        return torch.stack((cross_entropy, self.divergence(target, student)), -1)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Returns the loss, summed over the tokens that are not masked.

        Args:
            outputs: the cross-entropy and the divergence of each token, and the distances of its hidden states:
                `[batch, seq, 2 + pairs]`.
        """
        weight = batch.weight.to(outputs.dtype)
        cross_entropy, apart = ((outputs[..., i] * weight).sum() for i in (0, 1))
        total = self.alpha * cross_entropy + (1 - self.alpha) * self.temperature**2 * apart
        count = batch.weight.sum(dtype=torch.float64)
        scalars = {"cross_entropy": (cross_entropy, count), "divergence": (apart, count)}
        if self.hidden_layers:
            hidden = (outputs[..., 2:].mean(-1) * weight).sum()
            total, scalars["hidden_loss"] = total + self.hidden_weight * hidden, (hidden, count)
        return Loss(total, scalars)


def _pairs(given: list[list[int]]) -> dict[int, int]:
    """Returns the student's hidden state -> the teacher's, for pairs of numbers. Raises UserError for other lists."""
    if any(len(pair) != 2 for pair in given) or len({pair[0] for pair in given}) < len(given):
        raise UserError(
            f"objective.hidden_layers: {given} are not pairs [student's state, teacher's state], each of another state "
            "of the student; give pairs such as [[4, 8], [8, 16]]"
        )
    return {pair[0]: pair[1] for pair in given}


def _keep(kept: dict[str, torch.Tensor], number: int, states: torch.Tensor) -> torch.Tensor:
    """Keeps hidden states `[batch, seq, hidden]` in `kept`. Returns no values, `[batch, seq, 0]`."""
    kept[f"teacher_hidden.{number}"] = states
    return states[..., :0]


def distance(teacher: torch.Tensor, student: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Returns the distance of hidden states, in at least float32: both `[batch, seq, hidden]` -> `[batch, seq, 1]`.

    Args:
        kind: mse or cosine, as in `Distill`.
    """
    dtype = torch.promote_types(student.dtype, torch.float32)
    teacher, student = teacher.to(dtype), student.to(dtype)
    if kind == "mse":
        return (teacher - student).square().mean(-1, keepdim=True)
    return 1 - torch.cosine_similarity(teacher, student, dim=-1).unsqueeze(-1)


def divergence(teacher: torch.Tensor, student: torch.Tensor, *, kind: str, beta: float) -> torch.Tensor:
    """Returns a divergence of distributions, given their log-probabilities: `[n, outcomes]` -> `[n]`.

    The result is never negative: rounding errors below 0 are set to 0. Its gradient is not affected.

    Args:
        kind: forward, reverse or jsd, as in `Distill`.
        beta: weight of the teacher in `jsd`.
    """
    if kind == "forward":
        found = _kl(teacher, student)
    elif kind == "reverse":
        found = _kl(student, teacher)
    else:
        mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        found = beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)
    return found + (found.clamp_min(0) - found).detach()


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Returns KL(p || q) = sum p log(p / q), given log-probabilities `[n, outcomes]`; outcomes with p = 0 add 0."""
    likely = p.exp()
    return (likely * (p - q)).where(likely > 0, 0).sum(-1)


def reduced(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities of `ids` `[n, k]`, and of all other tokens together: `[n, k + 1]`."""
    others = logprobs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat((logprobs.gather(-1, ids), others), -1)


def most_likely(logits: torch.Tensor, tokens: slice, *, k: int, vocab: int | None = None) -> torch.Tensor:
    """Returns the reduced log-probabilities `[n, k + 1]`, and the ids of the k most likely tokens: `[n, 2 k + 1]`.

    If the vocabulary has at most k tokens, all but one are listed. Ids are exact as floats.

    Args:
        vocab: number of ids; logits of higher ids are omitted. None: all ids.
    """
    logprobs = logits[:, :vocab].log_softmax(-1)
    ids = logprobs.topk(min(k, logprobs.shape[-1] - 1), -1).indices
    return torch.cat((reduced(logprobs, ids), ids.to(logprobs.dtype)), -1)


def _inputs(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ("tokens", "positions", "segments")}
