"""Defines `Rollouts`, the settings by which an objective generates its training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rollouts:
    """The settings of an objective that learns from completions that the model generates itself.

    An objective with the attribute `rollouts` of this class also has `temperature`, `max_new_tokens` (maximum number of
    new tokens of a completion), `updates_per_rollout`, and the method `advantages(rewards)`.

    In place of `advantages` it can have the method `choose(rewards)` and the attribute `documents_per_item`, a number
    n. For rewards `[prompts, group]`, `choose` returns the indices of the completions of each group that are learned,
    int64 `[prompts, n]`. They are adjacent documents of one sequence. If the same index is chosen twice, no completion
    of the group is learned.

    Attributes:
        reward: reward function as `module:function`, or path of a reward model; or several, with weights if it is a
            mapping.
        group: number of completions per prompt.
        prompts: number of prompts per rollout.
        minibatches: number of optimizer steps in which each completion of a rollout is used once.
        top_p, top_k: settings of sampling, as in `Sampling`.
        reward_timeout: maximum number of seconds of a call of a reward function or tool.
        max_turns: maximum number of the model's messages in a completion; more than one needs tools.
        tools: functions that the model can call, as `module:function`.
    """

    reward: str | Sequence[str] | Mapping[str, float]
    group: int = 8
    prompts: int = 16
    minibatches: int = 1
    top_p: float | None = None
    top_k: int | None = None
    reward_timeout: float = 60.0
    max_turns: int = 1
    tools: Sequence[str] = ()

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward function, by `module:function`, and of each reward model, by path."""
        if isinstance(self.reward, Mapping):
            return dict(self.reward)
        return dict.fromkeys([self.reward] if isinstance(self.reward, str) else self.reward, 1.0)
