"""Online preference optimization: DPO on pairs of answers that the model itself samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt

from weft.data.batches.batch import Batch
from weft.generation.rollouts import Rollouts
from weft.objectives.dpo import DPO


class OnlineDPO(DPO):
    """Online DPO (Guo et al., 2024): the loss of `dpo` on the best and the worst of the answers sampled for a prompt.

    The answers of a rollout are ranked by their rewards. A prompt whose answers all have the same reward has no pair.
    Log-probabilities are those of `softmax(logits / temperature)`, the distribution from which answers are sampled.

    Args:
        beta: strength of the constraint to stay near the reference.
        loss: the loss of a pair, as in `dpo`.
        label_smoothing: for `cdpo` and `robust`, the assumed probability that a pair is ranked wrongly.
        length_normalized: whether log-probabilities are divided by the number of tokens of the answer. Default: only
            for `ipo`.
        reference: the reference model: `start`, the model as the run starts, or a path of a model.
        reward: reward function as `module:function` or path of a reward model, a list of these, or a mapping to their
            weights, as in `grpo`.
        prompts: number of prompts per rollout.
        group: number of answers to each prompt.
        temperature: temperature of sampling, by which logits are divided.
        top_p: sample from the smallest set of most likely tokens whose total probability is at least this value.
            Default: all tokens.
        max_new_tokens: largest number of tokens of an answer. `data.sequence_length` must hold two answers, each with
            its prompt.
        updates_per_rollout: number of optimizer steps with the answers of one rollout.
        reward_timeout: maximum number of seconds of a call of a reward function for a rollout.
    """

    data = "text"
    documents_per_item = 2

    def __init__(
        self,
        *,
        beta: Annotated[float, Gt(0)] = 0.1,
        loss: Literal["sigmoid", "ipo", "cdpo", "robust", "hinge"] = "sigmoid",
        label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
        length_normalized: bool | None = None,
        reference: str = "start",
        reward: str | list[str] | dict[str, float] | None = None,
        prompts: Annotated[int, Ge(1), Le(1_000_000)] = 16,
        group: Annotated[int, Ge(2), Le(1_000_000)] = 2,
        temperature: Annotated[float, Gt(0)] = 1.0,
        top_p: Annotated[float, Gt(0), Le(1)] | None = None,
        max_new_tokens: Annotated[int, Ge(1)] = 256,
        updates_per_rollout: Annotated[int, Ge(1)] = 1,
        reward_timeout: Annotated[float, Gt(0)] = 60.0,
    ):
        super().__init__(
            beta=beta,
            loss=loss,
            label_smoothing=label_smoothing,
            length_normalized=length_normalized,
            reference=reference,
        )
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.updates_per_rollout = updates_per_rollout
        self.rollouts = Rollouts(
            reward=reward or (), prompts=prompts, group=group, top_p=top_p, reward_timeout=reward_timeout
        )

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns the model's arguments, with labels and the temperature: the model returns log-probabilities."""
        inputs = super().inputs(batch)
        return inputs if self.temperature == 1.0 else inputs | {"temperature": self.temperature}

    def choose(self, rewards: torch.Tensor) -> torch.Tensor:
        """Returns the indices of the best and the worst answer of each group, `[prompts, 2]`, for `[prompts, group]`.

        They are equal if all answers of the group have the same reward.
        """
        return torch.stack((rewards.argmax(1), rewards.argmin(1)), 1)
