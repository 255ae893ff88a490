"""Policy gradients with advantages of groups (GRPO), and its variants Dr. GRPO, DAPO, GSPO and RLOO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le

from weft.data.batches.batch import Batch
from weft.data.batches.layout import Field
from weft.errors import UserError
from weft.generation.rollouts import Rollouts
from weft.objectives.advantages import group_advantages
from weft.parallel.objective import Forward, Loss, Objective

LARGEST = 20.0  # log-ratios are at most this, so that a ratio is finite: e^20 is far outside every clipping range


class GRPO(Objective):
    """Reinforcement learning from sampled answers, each with an advantage: how much better it is than its group.

    With the ratio `r = p(token) / p_old(token)` of the policy to the policy that sampled, the loss of a token is
    `-min(r A, clip(r, 1 - clip, 1 + clip_high) A) + beta KL`, for the advantage `A` of its answer. The variants of
    `loss` differ in the ratio and in how tokens are averaged. All log-probabilities are those of
    `softmax(logits / temperature)` over the full vocabulary, also if `top_p` or `top_k` limits sampling: on the policy
    that sampled, the ratio is then 1.

    The metrics are means over the tokens of answers: `ratio` (to the policy that sampled), `clip_fraction` (tokens
    without gradient), `entropy` (estimated as the mean of `-log p`), `kl` (with `beta`), `engine_deviation` (mean
    absolute difference between the log-probabilities of the trainer and of the engine that sampled) and
    `importance_weight` (its mean).

    Args:
        loss: variant of the loss.
            `grpo` (Shao et al., 2024): a ratio per token; an answer's mean over its tokens, averaged over answers.
            `dr_grpo` (Liu et al., 2025): a ratio per token; the sum over all tokens, divided by the constant
            `max_new_tokens` times the number of answers. Long answers do not count less per token.
            `dapo` (Yu et al., 2025): a ratio per token; the mean over all tokens of the global batch. The paper sets
            clip_high 0.28.
            `gspo` (Zheng et al., 2025): a ratio per answer, the geometric mean of the ratios of its tokens; averaged
            over answers. The paper sets clip 3e-4 and clip_high 4e-4.
            `rloo` (Ahmadian et al., 2024): a ratio per answer, the product of the ratios of its tokens; averaged over
            answers. Advantages are differences to the mean reward of the other answers of the group.
        clip: lower clipping range of the ratio.
        clip_high: upper clipping range. Default: `clip`.
        beta: coefficient of the KL divergence to the reference model, as a term of the loss; 0: no reference, and `kl`
            and `reference` are refused.
        kl: estimator of the KL divergence that the loss and the metric `kl` report (Schulman, 2020), for
            `x = log p - log p_reference`. `k1`: x. `k2`: x^2 / 2. `k3`: exp(-x) - 1 + x. The gradient is that of the
            exact divergence for each of them, estimated by `r x` times the gradient of log p. The gradient of `k1` as
            a term of the loss has the expectation 0, and that of `k3` is the gradient of the reverse divergence.
            Default: `k3`.
        reference: the reference model: `start`, the model as the run starts, or a path of a model.
        normalize: divisor of advantages. `group_std`: standard deviation of the group's rewards. `batch`: standard
            deviation of all rewards of the rollout. `none`: 1. Default: `none` for `dr_grpo` and `rloo`, else
            `group_std`. With `group_std`, prompts that are very easy or very hard count more.
        mask_truncated: exclude answers that reached `max_new_tokens` without ending: they have no loss, and are not
            counted in averages (in `dr_grpo`, the constant counts them).
        importance_cap: corrects the difference between the log-probabilities of the trainer and of the engine that
            sampled: each loss is multiplied by `min(p_old / p_engine, importance_cap)` (truncated importance sampling;
            Yao et al., 2025), for tokens or answers as the ratio. None: no correction, and no comparison.
        temperature: temperature of sampling, by which logits are divided.
        max_new_tokens: largest number of tokens of an answer.
        updates_per_rollout: number of optimizer steps with the answers of one rollout. If 1, the policy that sampled is
            the policy itself, and the ratio is 1. If more, batches have the log-probabilities `old_logprobs` of the
            policy that sampled.
        minibatches: number of parts of a rollout, each with all answers to some of its prompts. An optimizer step
            learns from one part, the parts take turns, and `updates_per_rollout` is a multiple of their number: 4
            updates with 2 minibatches use each answer twice.
        reward: reward function as `module:function`, or the path of a reward model (a run, checkpoint or Hugging Face
            folder); a list of these, whose rewards are added; or function or path -> weight. A function is called as
            `reward(prompts, completions, **columns)`, with one entry per answer, for the columns of the records that it
            has as arguments; or, if its arguments are `prompt` and `completion`, for each answer. It can be async.
            Required if `data.train` is a file of prompts.
        prompts: number of prompts per rollout.
        group: number of answers to each prompt, whose mean reward is the baseline.
        top_p: sample from the smallest set of most likely tokens whose total probability is at least this value.
            Default: all tokens.
        top_k: sample from this number of most likely tokens. Default: all tokens.
        reward_timeout: maximum number of seconds of a call of a reward function for a rollout, or of a tool.
        max_turns: maximum number of messages that the model writes to a prompt; more than one needs `tools`.
        tools: functions as `module:function` that the model can call, in the format of its chat template. The result is
            appended as a message, which is not learned, and the model writes another message.
    """

    inherits_dropout = False
    weigh_documents = True  # the weights of an answer's tokens add up to 1

    def __init__(
        self,
        *,
        loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo"] = "grpo",
        clip: Annotated[float, Gt(0)] = 0.2,
        clip_high: Annotated[float, Gt(0)] | None = None,
        beta: Annotated[float, Ge(0)] = 0.0,
        kl: Literal["k1", "k2", "k3"] | None = None,
        reference: str = "start",
        normalize: Literal["group_std", "batch", "none"] | None = None,
        mask_truncated: bool = False,
        importance_cap: Annotated[float, Gt(0)] | None = 2.0,
        temperature: Annotated[float, Gt(0)] = 1.0,
        max_new_tokens: Annotated[int, Ge(1)] = 256,
        updates_per_rollout: Annotated[int, Ge(1)] = 1,
        minibatches: Annotated[int, Ge(1)] = 1,
        reward: str | list[str] | dict[str, float] | None = None,
        prompts: Annotated[int, Ge(1), Le(1_000_000)] = 16,
        group: Annotated[int, Ge(2), Le(1_000_000)] = 8,
        top_p: Annotated[float, Gt(0), Le(1)] | None = None,
        top_k: Annotated[int, Ge(1)] | None = None,
        reward_timeout: Annotated[float, Gt(0)] = 60.0,
        max_turns: Annotated[int, Ge(1)] = 1,
        tools: Sequence[str] = (),
    ):
        if not beta and (reference != "start" or kl is not None):
            key = "kl" if reference == "start" else "reference"
            raise UserError(f"objective.{key}: no effect with beta: 0; set beta, such as 0.04")
        self.variant, self.beta = loss, beta
        self.kl: Literal["k1", "k2", "k3"] = kl or "k3"
        self.clip, self.clip_high = clip, clip if clip_high is None else clip_high
        default = "none" if loss in ("dr_grpo", "rloo") else "group_std"
        self.normalize: Literal["group_std", "batch", "none"] = normalize or default
        self.mask_truncated, self.importance_cap = mask_truncated, importance_cap
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.updates_per_rollout = updates_per_rollout
        self.rollouts = Rollouts(
            reward=reward or (),
            prompts=prompts,
            group=group,
            minibatches=minibatches,
            top_p=top_p,
            top_k=top_k,
            reward_timeout=reward_timeout,
            max_turns=max_turns,
            tools=tuple(tools),
        )
        if beta:
            self.frozen_models = {"reference": reference}
            self.prepare = self._reference_logprobs

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of batches, aligned with `labels`; log-probabilities are 0 where no token was sampled.

        - `advantage`: a number per document, as `advantages` returns it.
        - `truncated`, with `mask_truncated`: a number per document, 1 if the answer reached `max_new_tokens` without
          ending, else 0.
        - `rollout_logprobs`, with `importance_cap`: log-probabilities of the engine that sampled, of
          softmax(logits / temperature) over the full vocabulary.
        - `old_logprobs`, with several `updates_per_rollout`: the model's outputs for `inputs` before the first of them.
        """
        fields = {"advantage": Field(per_document=True, dtype="float64")}
        if self.mask_truncated:
            fields["truncated"] = Field(per_document=True)
        if self.importance_cap is not None:
            fields["rollout_logprobs"] = Field(seq_dim=0)
        if self.updates_per_rollout > 1:
            fields["old_logprobs"] = Field(seq_dim=0, dtype="float64")
        return fields

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the metrics."""
        engine = ("engine_deviation", "importance_weight") if self.importance_cap is not None else ()
        return ("entropy", "ratio", "clip_fraction", *engine, *(("kl",) if self.beta else ()))

    def advantages(self, rewards: torch.Tensor) -> torch.Tensor:
        """Returns the advantages of answers with the rewards `[prompts, group]`, float64 `[prompts, group]`.

        Raises:
            UserError: a group has fewer than 2 answers, or a reward is not finite.
        """
        try:
            return group_advantages(rewards, normalize=self.normalize, leave_one_out=self.variant == "rloo")
        except ValueError as error:
            raise UserError(f"objective: {error}") from None

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns the model's arguments, with labels and the temperature: the model returns log-probabilities."""
        inputs = super().inputs(batch)
        return inputs if self.temperature == 1.0 else inputs | {"temperature": self.temperature}

    def weight(self, batch: Batch) -> torch.Tensor:
        """Returns the number of answers (tokens for `dapo`, `max_new_tokens` times answers for `dr_grpo`)."""
        learned = self._learned(batch)
        if self.variant == "dapo":
            return learned.sum(dtype=torch.float64)
        if self.variant == "dr_grpo":
            return batch.weight.sum(dtype=torch.float64) * self.max_new_tokens
        return (batch.weight * learned).sum(dtype=torch.float64)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> Loss:
        """Returns the loss, summed over what `weight` counts, and the metrics.

        Args:
            outputs: log-probabilities of the labels, `[batch, seq]`.
        """
        policy, learned, extra = outputs.to(torch.float64), self._learned(batch), batch.extra
        now, advantage = policy.detach(), extra["advantage"]
        # Weights that add up to 1 over an answer, or 1 for each token.
        means, ones = batch.weight * learned, learned.to(torch.float64)
        per_token = ones if self.variant in ("dr_grpo", "dapo", "rloo") else means
        old = extra["old_logprobs"] if self.updates_per_rollout > 1 else now
        log_ratio = (policy - old).masked_fill(~learned, 0.0)

        ratio = self._ratio(log_ratio, means, batch)
        low, high = 1 - self.clip, 1 + self.clip_high
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).masked_fill(~learned, 0.0)
        losses = surrogate * (means if self.variant == "rloo" else per_token)
        clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))

        token_ratio = log_ratio.detach().clamp(max=LARGEST).exp()  # weighs expectations under the policy
        metrics = {"entropy": -now * token_ratio, "ratio": token_ratio, "clip_fraction": clipped}
        if self.beta:
            log_quotient = (now - extra["reference_logprobs"]).masked_fill(~learned, 0.0)
            value = token_ratio * estimate_kl(log_quotient, self.kl)
            losses = losses + self.beta * per_token * (value + token_ratio * log_quotient * (policy - now))
            metrics["kl"] = value
        if self.importance_cap is not None:
            gap = (old - extra["rollout_logprobs"]).masked_fill(~learned, 0.0)
            importance = self._ratio(gap, means, batch).clamp(max=self.importance_cap)
            losses = losses * importance
            metrics |= {"engine_deviation": gap.abs(), "importance_weight": importance}
        count = ones.sum()
        return Loss(losses.sum(), {name: ((value * ones).sum(), count) for name, value in metrics.items()})

    def _learned(self, batch: Batch) -> torch.Tensor:
        """Returns which tokens have a loss, bool `[batch, seq]`."""
        learned = batch.weight > 0
        return learned & (batch.extra["truncated"] == 0) if self.mask_truncated else learned

    def _ratio(self, log_ratio: torch.Tensor, means: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the ratio of each token, or of its answer, `[batch, seq]`.

        Args:
            log_ratio: logarithm of the ratio of each token, 0 outside of answers.
            means: weights of the tokens that add up to 1 over an answer.
        """
        if self.variant == "gspo":
            log_ratio = batch.at_tokens(batch.document_sums(log_ratio * means))
        elif self.variant == "rloo":
            log_ratio = batch.at_tokens(batch.document_sums(log_ratio))
        return log_ratio.clamp(max=LARGEST).exp()

    def _reference_logprobs(self, forward: Forward, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"reference_logprobs": forward(self.inputs(batch), model="reference")}


def estimate_kl(log_quotient: torch.Tensor, kind: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Returns an estimate of the KL divergence of a policy from a reference, for each token that the policy sampled.

    Args:
        log_quotient: log p - log p_reference of the tokens.
        kind: the estimator (Schulman, "Approximating KL divergence", 2020); `k1` and `k3` are unbiased.
    """
    if kind == "k1":
        return log_quotient
    if kind == "k2":
        return log_quotient.square() / 2
    return (-log_quotient).clamp(max=LARGEST).exp() - 1 + log_quotient
