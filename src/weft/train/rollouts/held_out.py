"""Defines `HeldOutPrompts`, whose completions by the trained model are rewarded in validations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from weft.errors import UserError
from weft.parallel.ranks import distinct_values, error_on_all_ranks
from weft.train.job import Job
from weft.train.rollouts.generator import Generator
from weft.train.rollouts.prompts import Prompts, read_prompts


class HeldOutPrompts:
    """The prompts of `data.validation`, and how their completions are generated: one for each prompt.

    Args:
        generator: generates completions and computes rewards, as in training.

    Attributes:
        sets: the prompts of each set, by the name of the set; "" if `data.validation` is a single set.

    Raises:
        UserError: the prompts are invalid, a reward needs a column that they do not have, or a set has the name of a
            reward.
    """

    def __init__(self, job: Job, generator: Generator):
        self.job, self.generator, data = job, generator, job.config.data
        tokenizer, room, schemas = generator.tokenizer, generator.room, generator.tools.schemas
        self.sets: dict[str, Prompts] = {}
        for name, path in data.held_out.items():
            assert isinstance(path, str)
            found = self.sets[name] = read_prompts(path, data, tokenizer, room, schemas, held_out=True)
            generator.rewards.check_columns(found.columns, found.missing)
            if found.conversation is not None and generator.prompts.conversation is None:
                what = "the held-out prompts are messages, but those of data.train are texts"
                raise UserError(f"{what}; use prompts of the same kind", path)
            if len(generator.rewards.names) > 1 and name in generator.rewards.names:
                raise UserError(f"data.validation.{name}: a reward has this name, too; rename the set")
        temperature, plain = job.config.validation.temperature or 0.0, {}
        if not temperature:
            plain = {"tempered_logprobs": False, "top_k": None, "top_p": None}
        self.sampling = replace(generator.sampling, temperature=temperature, **plain)

    def check_ranks(self) -> None:
        """Raises UserError on all ranks if they have read different prompts. Warns of prompts that were dropped."""
        for name, prompts in self.sets.items():
            key = "data.validation" + f".{name}" * bool(name)
            if len(distinct_values(prompts.digest)) > 1:
                raise error_on_all_ranks(f"{key}: the ranks have different prompts; give all the same files")
            if prompts.dropped:
                what = f"dropped {prompts.dropped:,} of {prompts.dropped + len(prompts.found):,} prompts"
                self.job.console.warning(f"{key}: {what}, which are too long; raise data.sequence_length")

    def validate(
        self, step: int, *, full: bool, seed: Callable[[int], int], stopping: Callable[[], bool]
    ) -> dict[str, float]:
        """Returns the mean rewards and lengths of completions by the current weights. All ranks call it.

        Args:
            full: whether to complete all prompts, instead of up to `validation.prompts` of each set.
            seed: returns the seed of a prompt, given its index in the set.
            stopping: whether this rank stops early; it is asked after each step of the engine.

        Returns:
            `validation_reward`, `validation_completion_length`, `validation_truncated` and, of several rewards,
            `validation_reward/REWARD`: means over all prompts; with named sets also of each set, with `/SET` appended.
            {} on all ranks if any rank stopped.

        Raises:
            UserError: on all ranks, if a reward fails or the logits are not finite.
        """
        limit = None if full else self.job.config.validation.prompts
        at_once = self.generator.settings.prompts * self.generator.settings.group  # as many rewards as in training
        every: dict[str, dict[str, torch.Tensor]] = {}
        for name, prompts in self.sets.items():
            parts = []
            chosen = prompts.found[:limit]
            for first in range(0, len(chosen), at_once):
                part = chosen[first : first + at_once]
                seeds = [seed(index) for index in range(first, first + len(part))]
                task = f"step {step:,}, validating"
                found = self.generator.generate(part, seeds, 1, self.sampling, task=task, stopping=stopping)
                if found is None:
                    return {}
                parts.append(self.generator.values(found))
            every[name] = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        keys = next(iter(every.values()))
        means = {f"validation_{key}": float(torch.cat([one[key] for one in every.values()]).mean()) for key in keys}
        for name, values in every.items():
            if name:
                means |= {f"validation_{key}/{name}": float(row.mean()) for key, row in values.items()}
        return means
