"""Defines `RolloutSource`, the batches of a run whose model generates its own training data."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft.config.derive import split_batch
from weft.data.batches.batch import Batch
from weft.data.batches.layout import Layout
from weft.data.batches.order import Epochs
from weft.errors import UserError
from weft.formatting import counted
from weft.generation.rollouts import Rollouts
from weft.parallel.passes import Passes
from weft.parallel.ranks import distinct_values, error_on_all_ranks
from weft.train.callbacks import Callback, State
from weft.train.job import Job
from weft.train.rollouts.generator import Generator
from weft.train.rollouts.held_out import HeldOutPrompts
from weft.train.rollouts.prompts import RolloutPrompt
from weft.train.rollouts.rollout import (
    PER_DOCUMENT,
    PER_TOKEN,
    Completion,
    PackedDocuments,
    Rollout,
    pack_documents,
)

Show = Callable[[int, Sequence[str], Sequence[str]], None]
EXAMPLES = 2  # completions per rollout that are shown


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
        self.generator = Generator(job, objective)
        self.prompts, self.length = self.generator.prompts, self.generator.length
        self.held_out = HeldOutPrompts(job, self.generator) if config.data.held_out else None
        self.order = Epochs(len(self.prompts.found), config.run.seed, shuffle=config.data.shuffle)
        self.reward_models: dict[str, str] = {}  # path -> digest
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
        if self.held_out is not None:
            self.held_out.check_ranks()
        self.reward_models = {str(one.checkpoint): one.digest() for one in self.generator.rewards.models}
        dropped, data = self.prompts.dropped, self.job.config.data
        if dropped:
            total = counted(dropped + len(self.prompts.found), "prompt")
            room = f"the {self.generator.room:,} tokens that objective.max_new_tokens leaves of a sequence"
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
        self.generator.model = passes.model

    # ---- batches

    def iterate(self, start: int, stop: int, workers: int = 0) -> Iterator[Batch | None]:
        """Yields this rank's batches of updates `start` to `stop - 1`. Each must be used before the next is requested.

        Yields None on all ranks, and ends, if a rank was asked to stop before a rollout was complete. Each rank that
        was asked stops sampling after at most one step of the engine.

        Raises:
            UserError: on all ranks, if a reward function fails or the logits are not finite.
        """
        for step in range(start, stop):
            number = step // self.updates
            if self.rollout is None or self.rollout.number != number:
                self.rollout = None  # frees memory
                asked = bool(sum(self.job.world.sum(votes=[float(self._stopping())])))
                self.rollout = None if asked else self._roll_out(number, step)
                if self.rollout is None:
                    yield None
                    return
                if "old_logprobs" in self.layout.fields:
                    self._compute_old_logprobs(self.rollout)
            yield self._of_rank(self._pack(self.rollout, step % self.updates % self.settings.minibatches))

    def _stopping(self) -> bool:
        """Whether this rank was asked to stop, by a signal or a callback."""
        return any(self.state.stop.votes)

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
        padding, per_item = self.generator.tokenizer.eod_id, self.generator.per_item
        return pack_documents(
            rollout,
            documents,
            self.generator.length,
            self.layout,
            padding=padding,
            first_sample=first,
            per_item=per_item,
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

    def _roll_out(self, number: int, step: int) -> Rollout | None:
        """Generates the completions of a rollout, and computes their rewards and advantages. All ranks call it.

        Returns:
            The rollout; None on all ranks if any rank was asked to stop.
        """
        began, settings = time.perf_counter(), self.settings
        samples = self.samples(number * self.updates)
        prompts = [self.prompts.found[int(index)] for index in self.order(samples)]
        seeds = [self._seed("rollout", int(sample)) for sample in samples]
        sampling, task = self.generator.sampling, f"step {step + 1:,}"
        found = self.generator.generate(prompts, seeds, settings.group, sampling, task=task, stopping=self._stopping)
        if found is None:
            return None
        completions, _, groups = found
        rollout = Rollout.of(number, *self._select(completions, groups))
        rollout.metrics = self.generator.metrics(found)
        rollout.metrics["equal_rewards"] = float((groups == groups[:, :1]).all(1).double().mean())
        rollout.metrics["rollout_seconds"] = time.perf_counter() - began
        self._show(step, prompts, completions, groups.flatten())
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

    def validate(self, step: int, *, full: bool) -> dict[str, float]:
        """Returns the metrics of held-out prompts (see `HeldOutPrompts.validate`); {} if a rank was asked to stop."""
        if self.held_out is None:
            return {}
        seed = partial(self._seed, "validation")  # equal in all validations, which are compared
        return self.held_out.validate(step, full=full, seed=seed, stopping=self._stopping)

    def _seed(self, use: str, sample: int) -> int:
        """Returns the seed of the completions of a prompt, given the index of the prompt in the run."""
        key = f"{self.job.config.run.seed} {use} {sample}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")

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
        """Returns the rollout of the next update, if updates have used it already, and digests of reward models."""
        step, rollout = self.state.step, self.rollout
        unfinished = rollout is not None and step % self.updates and rollout.number == step // self.updates
        models = {"reward_models": self.reward_models} if self.reward_models else {}
        if not unfinished or rollout is None:
            return models
        return rollout.state_dict() | {"settings": self._numbers()} | models

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the rollout that `state_dict` returned.

        Raises:
            UserError: the rollout has other numbers of prompts, completions or updates than the run, or a reward model
                has changed.
        """
        before = state.get("reward_models", {})
        for path, digest in self.reward_models.items():
            if before.get(path, digest) != digest:
                what = "this is not the reward model with which the run started"
                raise UserError(f"objective.reward: {path}: {what}; restore it, or start another run")
        if "number" not in state:
            return
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
