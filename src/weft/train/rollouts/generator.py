"""Defines `Generator`, which generates completions with the trained model and computes their rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from weft.config.derive import sequence_length
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.rollouts import Rollouts
from weft.generation.settings import Sampling
from weft.observe.status import LONG, doing
from weft.parallel.ranks import all_gather_object
from weft.train.job import Job
from weft.train.rollouts.draft import Draft
from weft.train.rollouts.policy import Policy, Request
from weft.train.rollouts.prompts import RolloutPrompt, read_prompts
from weft.train.rollouts.rewards import Rewards
from weft.train.rollouts.rollout import Completion
from weft.train.rollouts.tools import Tools

QUANTILES = (0.1, 0.5, 0.9)


class Rewarded(NamedTuple):
    """Completions with their rewards, equal on all ranks.

    Attributes:
        completions: the completions of the first prompt, then those of the next.
        rewards: float64 `[functions, completions]`.
        groups: the weighted sums of the rewards, float64 `[prompts, group]`.
    """

    completions: list[Completion]
    rewards: torch.Tensor
    groups: torch.Tensor


class Generator:
    """Generates completions of prompts with the weights of the trained model, and computes their rewards.

    The ranks divide the completions among themselves. All ranks then have all completions.

    Args:
        objective: an objective with the attribute `rollouts`.

    Attributes:
        room: maximum number of tokens of a prompt.
        per_item: number of completions that a sequence must hold together.
        prompts: the prompts of `data.train`.
        sampling: settings of sampling, without the seed.
        model: the sharded model; must be set before the first completion is generated.

    Raises:
        UserError: a sequence has no room for a prompt, the prompts are invalid, or a reward or tool cannot be called.
    """

    def __init__(self, job: Job, objective: Any):
        self.job, config, settings = job, job.config, objective.rollouts
        self.settings: Rollouts = settings
        assert config.tokenizer is not None
        assert isinstance(config.data.train, str)
        self.tokenizer = Tokenizer.load(config.tokenizer)
        self.length, self.new_tokens = sequence_length(config), int(objective.max_new_tokens)
        self.tools = Tools(settings.tools, settings.reward_timeout)
        self.per_item = int(getattr(objective, "documents_per_item", 1))
        self.room = self.length // self.per_item - self.new_tokens
        if self.room < 1:
            of = "" if self.per_item == 1 else f", which must hold {self.per_item} completions with their prompts"
            raise UserError(
                f"objective.max_new_tokens: {self.new_tokens} new tokens leave no room for a prompt in sequences of "
                f"{self.length} tokens{of}; lower the number, or raise data.sequence_length"
            )
        self.prompts = read_prompts(config.data.train, config.data, self.tokenizer, self.room, self.tools.schemas)
        if settings.tools and self.prompts.conversation is None:
            raise UserError("objective.tools: tools need prompts of messages, but all prompts are texts; remove tools")
        self.rewards = Rewards(settings.weights, settings.reward_timeout, self.prompts.columns, self.prompts.missing)
        self.sampling = Sampling(
            self.new_tokens,
            objective.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            logprobs=0,
            tempered_logprobs=True,
        )
        self.model: nn.Module | None = None
        self._policy: Policy | None = None

    def generate(
        self,
        prompts: Sequence[RolloutPrompt],
        seeds: Sequence[int],
        group: int,
        sampling: Sampling,
        *,
        task: str,
        stopping: Callable[[], bool] = lambda: False,
    ) -> Rewarded | None:
        """Generates `group` completions of each prompt with the current weights. All ranks call it.

        Args:
            seeds: seed of the completions of each prompt.
            task: what the process does, for the watchdog and the status, such as "step 7".
            stopping: whether this rank stops before the completions are complete; it is asked after each step of the
                engine.

        Returns:
            The completions with their rewards; None on all ranks if any rank stopped.

        Raises:
            UserError: on all ranks, if a reward fails or the logits are not finite.
        """
        world = self.job.world
        doing(f"{task}, generating completions", "rollout", LONG)
        policy = self._updated_policy()
        mine = np.array_split(np.arange(len(prompts) * group), world.ranks)[world.rank].tolist()
        drafts = [
            Draft(prompts[index // group], seeds[index // group], self.length // self.per_item, self.new_tokens)
            for index in mine
        ]
        copies = [index % group for index in mine]
        world.agree(lambda: self._complete(policy, drafts, copies, sampling, stopping))
        if sum(world.sum(votes=[float(stopping())])):
            return None
        for model in self.rewards.models:
            model.load(self.job)
        scored = world.agree(lambda: self._score([draft.completion() for draft in drafts], mine, prompts, group))
        completions = [one for part in all_gather_object(scored) for one in part]
        doing(f"{task}, computing rewards", "rewards", LONG + self.settings.reward_timeout)
        each = world.agree(lambda: self._reward(prompts, completions, group).tolist(), only_first=True)
        rewards = torch.tensor(each, dtype=torch.float64)  # [functions, completions]
        total = torch.tensor(self.rewards.weights, dtype=torch.float64) @ rewards
        return Rewarded(completions, rewards, total.view(len(prompts), group))

    def _updated_policy(self) -> Policy:
        """Returns the policy with the current weights of the trained model. All ranks call it."""
        assert self.model is not None
        if self._policy is None:
            stop_ids = {self.tokenizer.eod_id}
            if self.prompts.conversation is not None:
                stop_ids |= self.prompts.conversation.stop_ids
            self._policy = Policy(self.job, self.model, stop_ids)
        self._policy.update()
        return self._policy

    def _complete(
        self,
        policy: Policy,
        drafts: Sequence[Draft],
        copies: Sequence[int],
        sampling: Sampling,
        stopping: Callable[[], bool],
    ) -> None:
        """Generates this rank's completions, or a part of them if `stopping` becomes true.

        Args:
            copies: index of each completion in its group.
        """
        conversation = self.prompts.conversation
        for turn in range(self.settings.max_turns):
            active = [(draft, copy) for draft, copy in zip(drafts, copies, strict=True) if draft.active]
            requests = [Request(draft.ids, draft.sampling(sampling), copy) for draft, copy in active]
            generated = policy.generate(requests, stopping)
            if generated is None:
                return
            for (draft, _), found in zip(active, generated, strict=True):
                draft.add(found.ids, found.logprobs, found.complete, self.tokenizer)
                if conversation is not None and turn + 1 < self.settings.max_turns:
                    draft.call_tool(found.ids, self.tools, conversation)

    def _score(
        self, completions: list[Completion], mine: Sequence[int], prompts: Sequence[RolloutPrompt], group: int
    ) -> list[Completion]:
        """Returns this rank's completions with the scores of the reward models."""
        if not self.rewards.models or not completions:
            return completions
        messages = [
            one.messages or as_messages(prompts[index // group], one)
            for one, index in zip(completions, mine, strict=True)
        ]
        places = [_place(prompts, index, group) for index in mine]
        rows = zip(*(model(messages, places) for model in self.rewards.models), strict=True)
        return [one._replace(scores=list(scores)) for one, scores in zip(completions, rows, strict=True)]

    def _reward(self, prompts: Sequence[RolloutPrompt], completions: Sequence[Completion], group: int) -> torch.Tensor:
        """Returns the rewards of each function and reward model, `[functions, completions]`."""
        owners = [prompts[index // group] for index in range(len(completions))]
        columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        arguments: dict[str, list[Any]] = {name: [owner.columns.get(name) for owner in owners] for name in columns}
        arguments["prompts"] = [owner.given for owner in owners]
        arguments["completions"] = [one.answers[-1] for one in completions]
        arguments["conversations"] = [one.messages for one in completions]
        places = [_place(prompts, index, group) for index in range(len(completions))]
        return self.rewards(arguments, places, [one.scores for one in completions])

    def values(self, found: Rewarded) -> dict[str, torch.Tensor]:
        """Returns the values of each completion by the name of their metric, float64 `[completions]`."""
        completions, rewards, groups = found
        values = {"reward": groups.flatten()}
        if len(rewards) > 1:
            values |= {f"reward/{name}": row for name, row in zip(self.rewards.names, rewards, strict=True)}
        values["completion_length"] = torch.tensor([one.new_tokens for one in completions], dtype=torch.float64)
        values["truncated"] = torch.tensor([one.truncated for one in completions], dtype=torch.float64)
        return values

    def metrics(self, found: Rewarded) -> dict[str, float]:
        """Returns the means and percentiles of rewards and lengths."""
        values = self.values(found)
        means = {name: float(row.mean()) for name, row in values.items()}
        spread = ("reward", "completion_length")
        return means | {f"{name}_p{q * 100:.0f}": float(values[name].quantile(q)) for name in spread for q in QUANTILES}


def _place(prompts: Sequence[RolloutPrompt], index: int, group: int) -> str:
    """Describes a completion, for messages."""
    return f"completion {index % group + 1} of {prompts[index // group].place}"


def as_messages(prompt: RolloutPrompt, completion: Completion) -> list[dict[str, Any]]:
    """Returns a prompt of text and its completion as messages, as records of preferences are read."""
    return [{"role": "user", "content": prompt.given}, {"role": "assistant", "content": completion.answers[-1]}]
