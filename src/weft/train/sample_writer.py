"""Defines `Sampler`, which generates text after the prompts of the config during training."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torch import nn

from weft.config.model import CustomModelSection
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.cache import BLOCK
from weft.generation.limits import check_prompts
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids
from weft.observe.status import LONG, doing
from weft.parallel.full_model import gather_full_model
from weft.parallel.model_state import state_of
from weft.train.auto_settings import DTYPES
from weft.train.job import Job
from weft.train.recorder import Recorder


class Sampler:
    """Generates text after each prompt of `samples.prompts`.

    Raises:
        UserError: the config has prompts, but the run has no tokenizer; or a prompt is too long for the model.
    """

    def __init__(self, job: Job, model: nn.Module):
        self.job, self.model = job, model
        texts, tokenizer = job.config.samples.prompts, job.run.tokenizer()
        if texts and tokenizer is None:
            raise UserError("samples.prompts: prompts need a tokenizer, but this run has none; set tokenizer")
        self.tokenizer: Tokenizer | None = tokenizer if texts else None
        self.prompts = [tokenizer.prompt(text) for text in texts] if tokenizer is not None else []
        settings = job.config.samples
        self.sampling = Sampling(settings.max_new_tokens, settings.temperature, seed=job.config.run.seed)
        if self.prompts:
            described: Any = SimpleNamespace(config=job.config.model)  # in a pipeline, `model` has only some layers
            try:
                check_prompts(described, [prompt.ids for prompt in self.prompts], self.sampling)
            except UserError as error:
                raise UserError(f"samples.prompts: {error.what}") from None

    def write(self, step: int, recorder: Recorder) -> None:
        """Generates and records a continuation of each prompt. Warns if the model's logits are not finite.

        All ranks generate with the sharded model; under `cp`, each with full sequences. A custom model
        that is sharded over `tp` or `pp` is run by the first rank alone, with a full copy of the model.
        """
        if self.tokenizer is None:
            return
        doing(f"step {step:,}, writing samples", "samples", LONG)
        config, model, shape = self.job.config, self.model, self.job.world.shape
        if shape.pp * shape.cp * shape.tp > 1 and isinstance(config.model, CustomModelSection):
            model = gather_full_model(model, config.model, self.job.world, DTYPES[config.training.dtype])
            if model is None:
                return
        stop_ids = frozenset([self.tokenizer.eod_id])
        # The size of the cache must not depend on the memory of each rank, because all ranks make the same steps.
        room = sum(len(prompt.ids) + self.sampling.max_new_tokens + BLOCK for prompt in self.prompts)
        shard = None if (state := state_of(model)) is None else state.sequence_shard
        try:
            with nullcontext() if shard is None else shard.full_sequences():
                ids = generate_ids(model, self.prompts, self.sampling, stop_ids=stop_ids, max_cache_tokens=room)
        except UserError as error:  # logits that are not finite are no reason to end the training
            recorder.warn_once(f"no samples at step {step}: {error.what}")
            return
        texts = [[token for token in new if token not in stop_ids] for new in ids]
        recorder.samples(step, [prompt.text for prompt in self.prompts], [self.tokenizer.decode(t) for t in texts])
