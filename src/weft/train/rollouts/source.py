"""Defines `RolloutSource`, the batches of a run whose model generates its own training data."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft.config.derive import sequence_length, split_batch
from weft.data.batches.batch import Batch
from weft.data.batches.layout import Layout
from weft.data.batches.order import Epochs
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.formatting import counted
from weft.generation.rollouts import Rollouts
from weft.generation.settings import Sampling
from weft.observe.status import LONG, doing
from weft.parallel.passes import Passes
from weft.parallel.ranks import all_gather_object, distinct_values, error_on_all_ranks
from weft.train.callbacks import Callback, State
from weft.train.job import Job
from weft.train.rollouts.draft import Draft
from weft.train.rollouts.policy import Policy, Request
from weft.train.rollouts.prompts import RolloutPrompt, read_prompts
from weft.train.rollouts.rewards import Rewards
from weft.train.rollouts.rollout import (
    PER_DOCUMENT,
    PER_TOKEN,
    Completion,
    PackedDocuments,
    Rollout,
    pack_documents,
)
from weft.train.rollouts.tools import Tools

Show = Callable[[int, Sequence[str], Sequence[str]], None]
EXAMPLES = 2  # completions per rollout that are shown
QUANTILES = (0.1, 0.5, 0.9)


class RolloutSource(Callback):
    """The training batches of a run whose model generates completions of prompts, which are learned by their rewards.

    Rollout `r` has the prompts `r * prompts` to `(r + 1) * prompts - 1` of the run, in shuffled epochs, and `group`
    completions of each. Updates `r * updates_per_rollout` to `(r + 1) * updates_per_rollout - 1` learn from it: update
    `u` of a rollout uses mini-batch `u % minibatches`, which has an equal number of prompts with all their completions.

    The ranks divide the completions among themselves. All ranks then have the complete rollout, and each data parallel
    rank takes its sequences of the batch. As a callback, the source saves an unfinished rollout in checkpoints, and
    logs metrics.

    Args:
        objective: an objective with the attribute `rollouts`.
        layout: the fields that the objective declares.
    """

    def __init__(self, job: Job, objective: Any, layout: Layout):
        self.job, self.objective, self.layout = job, objective, layout
        config, settings = job.config, objective.rollouts
        self.settings: Rollouts = settings
        self.updates: int = objective.updates_per_rollout
        self._check_objective()
        assert config.tokenizer is not None
        assert isinstance(config.data.train, str)
        self.tokenizer = Tokenizer.load(config.tokenizer)
        self.length, self.new_tokens = sequence_length(config), int(objective.max_new_tokens)
        self.tools = Tools(settings.tools, settings.reward_timeout)
        self.per_item = int(getattr(objective, "documents_per_item", 1))
        room = self.length // self.per_item - self.new_tokens  # for a prompt
        if room < 1:
            of = "" if self.per_item == 1 else f", which must hold {self.per_item} completions with their prompts"
            raise UserError(
                f"objective.max_new_tokens: {self.new_tokens} new tokens leave no room for a prompt in sequences of "
                f"{self.length} tokens{of}; lower the number, or raise data.sequence_length"
            )
        self.room = room
        self.prompts = read_prompts(config.data.train, config.data, self.tokenizer, room, self.tools.schemas)
        if settings.tools and self.prompts.conversation is None:
            raise UserError("objective.tools: tools need prompts of messages, but all prompts are texts; remove tools")
        self.rewards = Rewards(settings.weights, settings.reward_timeout, self.prompts.columns, self.prompts.missing)
        self.order = Epochs(len(self.prompts.found), config.run.seed, shuffle=config.data.shuffle)
        self.sampling = Sampling(
            self.new_tokens,
            objective.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            logprobs=0,
            tempered_logprobs=True,
        )
        self.policy: Policy | None = None
        self.rollout: Rollout | None = None

    def _check_objective(self) -> None:
        """Raises UserError if rollouts cannot be divided into mini-batches, or lack a field of the objective."""
        parts = self.settings.minibatches
        for name, count in (("prompts", self.settings.prompts), ("updates_per_rollout", self.updates)):
            if count % parts:
                what = f"{parts} minibatches do not divide the {count} {name}"
                raise UserError(f"objective.minibatches: {what}; set a divisor")
        for name, declared in self.layout.fields.items():
            if name not in (known := PER_DOCUMENT if declared.per_document else PER_TOKEN):
                kind = "documents" if declared.per_document else "tokens"
                what = f"rollouts have no field {name!r} of {kind}, only {', '.join(known)}"
                raise UserError(f"objective: {what}; remove it from fields")

    def check_ranks(self) -> None:
        """Raises UserError on all ranks if they have read different prompts. Warns of prompts that were dropped."""
        if len(distinct_values(self.prompts.digest)) > 1:
            raise error_on_all_ranks("data.train: the ranks have different prompts; give all the same files")
        dropped, data = self.prompts.dropped, self.job.config.data
        if dropped:
            total = counted(dropped + len(self.prompts.found), "prompt")
            room = f"the {self.room:,} tokens that objective.max_new_tokens leaves of a sequence"
            self.job.console.warning(
                f"data.train: dropped {dropped:,} of {total}: longer than {room}; raise data.sequence_length"
            )
        self.job.console.line(f"data.train: {data.train}: {counted(len(self.prompts.found), 'prompt')}")

    def attach(self, passes: Passes, show: Show, every: int | None) -> None:
        """Must be called before the first batch.

        Args:
            passes: calls the trained model.
            show: writes examples: (number of updates, prompts, completions).
            every: number of updates between examples; None: no examples.
        """
        self.passes, self.show, self.show_every = passes, show, every

    # ---- batches

    def iterate(self, start: int, stop: int, workers: int = 0) -> Iterator[Batch]:
        """Yields this rank's batches of updates `start` to `stop - 1`. Each must be used before the next is requested.

        Raises:
            UserError: on all ranks, if a reward function fails or the logits are not finite.
        """
        for step in range(start, stop):
            number = step // self.updates
            if self.rollout is None or self.rollout.number != number:
                self.rollout = None  # frees memory
                self.rollout = self._roll_out(number, step)
                if "old_logprobs" in self.layout.fields:
                    self._compute_old_logprobs(self.rollout)
            yield self._of_rank(self._pack(self.rollout, step % self.updates % self.settings.minibatches))

    def samples(self, step: int) -> np.ndarray:
        """Returns the indices in the run (counted over all epochs) of the prompts in a step's rollout."""
        first = step // self.updates * self.settings.prompts
        return np.arange(first, first + self.settings.prompts, dtype=np.int64)

    def micro_batch_size(self, batch: Batch) -> int:
        """Returns the number of sequences per forward pass, for this rank's sequences of a global batch."""
        return self._split(len(batch.tokens))[1]

    def _split(self, each: int) -> tuple[int, int]:
        """Returns the number of sequences per rank, at least `each`, and the micro-batch size."""
        config, shape = self.job.config, self.job.world.shape
        while True:
            size = each * shape.data_ranks, self.length
            _, micro = split_batch(*size, shape, config.training.micro_batch_size, config.parallel)
            if shape.pp == 1 or config.parallel.supports(-(-each // micro), shape.pp):
                return each, micro
            each += 1

    def _pack(self, rollout: Rollout, minibatch: int) -> PackedDocuments:
        """Returns the global batch of a mini-batch of the rollout."""
        count = len(rollout.lengths) // self.settings.minibatches
        documents = range(minibatch * count, (minibatch + 1) * count)
        first = (rollout.number * self.settings.minibatches + minibatch) * count  # at least one document per sequence
        padding = self.tokenizer.eod_id
        return pack_documents(
            rollout, documents, self.length, self.layout, padding=padding, first_sample=first, per_item=self.per_item
        )

    def _of_rank(self, packed: PackedDocuments) -> Batch:
        world, batch = self.job.world, packed.batch
        each, _ = self._split(-(-len(batch.tokens) // world.data_ranks))
        return batch.pad(each * world.data_ranks - len(batch.tokens)).of_rank(world.data_rank, world.data_ranks)

    def _compute_old_logprobs(self, rollout: Rollout) -> None:
        """Sets `old_logprobs`: the model's log-probabilities before the first update, in the training micro-batches."""
        world = self.job.world
        rollout.old_logprobs = torch.zeros_like(rollout.rollout_logprobs)
        for minibatch in range(self.settings.minibatches):
            packed = self._pack(rollout, minibatch)
            mine = self._of_rank(packed)
            outputs = self.passes.forward_only(mine.split(self.micro_batch_size(mine)))
            if world.first_of_data_rank:
                begin, end = (n * len(mine.tokens) for n in (world.data_rank, world.data_rank + 1))
                source = packed.source[begin:end]
                learned = mine.weight[: len(source)] > 0
                rollout.old_logprobs[source[learned]] = outputs[: len(source)][learned].to("cpu", torch.float64)
        if world.ranks > 1:
            total = rollout.old_logprobs.to(world.device)
            dist.all_reduce(total)
            rollout.old_logprobs = total.to("cpu")

    # ---- rollouts

    def _roll_out(self, number: int, step: int) -> Rollout:
        """Generates the completions of a rollout, and computes their rewards and advantages. All ranks call it."""
        began, world, settings = time.perf_counter(), self.job.world, self.settings
        doing(f"step {step + 1:,}, generating a rollout", "rollout", LONG)
        if self.policy is None:
            stop_ids = {self.tokenizer.eod_id}
            if self.prompts.conversation is not None:
                stop_ids |= self.prompts.conversation.stop_ids
            self.policy = Policy(self.job, self.passes.model, stop_ids)
        self.policy.update()
        chosen = self.order(np.arange(number * settings.prompts, (number + 1) * settings.prompts))
        prompts = [self.prompts.found[int(index)] for index in chosen]
        mine = np.array_split(np.arange(len(prompts) * settings.group), world.ranks)[world.rank].tolist()
        done = world.agree(lambda: self._complete(number, prompts, mine))
        completions = [one for part in all_gather_object(done) for one in part]
        doing(f"step {step + 1:,}, computing rewards", "rewards", LONG + settings.reward_timeout)
        each = world.agree(lambda: self._reward(prompts, completions).tolist(), only_first=True)
        rewards = torch.tensor(each, dtype=torch.float64)  # [functions, completions]
        total = torch.tensor(self.rewards.weights, dtype=torch.float64) @ rewards
        groups = total.view(len(prompts), settings.group)
        rollout = Rollout.of(number, *self._select(completions, groups))
        rollout.metrics = self._metrics(completions, rewards, groups)
        rollout.metrics["rollout_seconds"] = time.perf_counter() - began
        self._show(step, prompts, completions, total)
        return rollout

    def _select(self, completions: list[Completion], rewards: torch.Tensor) -> tuple[list[Completion], torch.Tensor]:
        """Returns the completions that are learned, and their advantages (of chosen ones, their rewards).

        Args:
            rewards: `[prompts, group]`.
        """
        if not hasattr(self.objective, "choose"):
            return completions, self.objective.advantages(rewards)
        selected, chosen = [], self.objective.choose(rewards)  # [prompts, documents per item]
        for prompt, members in enumerate(chosen.tolist()):
            distinct = len(set(members)) == len(members)
            for member in members:
                one = completions[prompt * self.settings.group + member]
                selected.append(one if distinct else one._replace(learned=[0] * len(one.ids)))
        return selected, rewards.gather(1, chosen)

    def _complete(self, number: int, prompts: Sequence[RolloutPrompt], mine: Sequence[int]) -> list[Completion]:
        """Generates this rank's completions.

        Args:
            number: index of the rollout in the run.
            mine: indices of the completions among all completions of the rollout.
        """
        assert self.policy is not None
        group, first = self.settings.group, number * self.settings.prompts
        seeds = [self._seed(first + index // group) for index in mine]
        drafts = [
            Draft(prompts[index // group], seed, self.length // self.per_item, self.new_tokens)
            for index, seed in zip(mine, seeds, strict=True)
        ]
        for turn in range(self.settings.max_turns):
            active = [(index, draft) for index, draft in zip(mine, drafts, strict=True) if draft.active]
            requests = [Request(draft.ids, draft.sampling(self.sampling), index % group) for index, draft in active]
            for (_, draft), found in zip(active, self.policy.generate(requests), strict=True):
                draft.add(found.ids, found.logprobs, found.complete, self.tokenizer)
                if self.prompts.conversation is not None and turn + 1 < self.settings.max_turns:
                    draft.call_tool(found.ids, self.tools, self.prompts.conversation)
        return [draft.completion() for draft in drafts]

    def _seed(self, sample: int) -> int:
        """Returns the seed of the completions of a prompt, given the index of the prompt in the run."""
        key = f"{self.job.config.run.seed} rollout {sample}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")

    def _reward(self, prompts: Sequence[RolloutPrompt], completions: Sequence[Completion]) -> torch.Tensor:
        """Returns the rewards of each function, `[functions, completions]`."""
        group = self.settings.group
        owners = [prompts[index // group] for index in range(len(completions))]
        arguments: dict[str, list[Any]] = {
            name: [owner.columns.get(name) for owner in owners] for name in self.prompts.columns
        }
        arguments["prompts"] = [owner.given for owner in owners]
        arguments["completions"] = [one.answers[-1] for one in completions]
        arguments["conversations"] = [one.messages for one in completions]
        places = [f"completion {index % group + 1} of {owner.place}" for index, owner in enumerate(owners)]
        return self.rewards(arguments, places)

    def _metrics(
        self, completions: Sequence[Completion], rewards: torch.Tensor, groups: torch.Tensor
    ) -> dict[str, float]:
        lengths = torch.tensor([one.new_tokens for one in completions], dtype=torch.float64)
        found = {"reward": groups.mean(), "completion_length": lengths.mean()}
        if len(rewards) > 1:
            found |= {f"reward/{name}": row.mean() for name, row in zip(self.rewards.names, rewards, strict=True)}
        for name, values in (("reward", groups.flatten()), ("completion_length", lengths)):
            found |= {f"{name}_p{q * 100:.0f}": values.quantile(q) for q in QUANTILES}
        found["truncated"] = torch.tensor([float(one.truncated) for one in completions]).mean()
        found["equal_rewards"] = (groups == groups[:, :1]).all(1).double().mean()
        return {name: float(value) for name, value in found.items()}

    def _show(
        self, step: int, prompts: Sequence[RolloutPrompt], completions: Sequence[Completion], rewards: torch.Tensor
    ) -> None:
        """Writes the first completions as examples, if samples are due in one of the rollout's updates."""
        if self.show_every is None or step % self.show_every >= self.updates:
            return
        texts = [
            f"{' ... '.join(one.answers)} (reward {reward:.4g})"
            for one, reward in zip(completions[:EXAMPLES], rewards.tolist(), strict=False)
        ]
        shown = [prompts[index // self.settings.group].text for index in range(len(texts))]
        self.show(step + 1, shown, texts)

    # ---- callback

    def begin(self, state: State) -> None:
        """Keeps the state of the run, which knows the number of updates."""
        self.state = state

    def step(self, state: State) -> None:
        """Logs the metrics of the rollout."""
        if self.rollout is not None:
            state.log(self.rollout.metrics)

    def state_dict(self) -> dict[str, Any]:
        """Returns the rollout of the next update, if updates have used it already."""
        step, rollout = self.state.step, self.rollout
        unfinished = rollout is not None and step % self.updates and rollout.number == step // self.updates
        return rollout.state_dict() | {"settings": self._numbers()} if unfinished and rollout is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the rollout that `state_dict` returned.

        Raises:
            UserError: the rollout has other numbers of prompts, completions or updates than the run.
        """
        numbers, saved = self._numbers(), state.get("settings", {})  # earlier versions saved no settings
        for name in saved:
            if saved[name] != numbers[name]:
                what = f"the checkpoint is in the middle of a rollout with {saved[name]}, not {numbers[name]}"
                remedy = f"set {saved[name]} again, or resume from a checkpoint between two rollouts"
                raise UserError(f"objective.{name}: {what}; {remedy}")
        self.rollout = Rollout.from_state(state)

    def _numbers(self) -> dict[str, int]:
        """Returns the numbers that a rollout in a checkpoint must share with the run."""
        numbers = {name: getattr(self.settings, name) for name in ("prompts", "group", "minibatches")}
        return numbers | {"updates_per_rollout": self.updates}
