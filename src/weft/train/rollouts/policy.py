"""Defines `Policy`, which generates completions with the weights of the model that is being trained."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import nn

from weft.config.derive import sequence_length
from weft.generation.cache import BLOCK
from weft.generation.engine import Engine
from weft.generation.limits import blocks_in_memory
from weft.generation.settings import Sampling
from weft.kernels.decode_step import library
from weft.models.adapter import is_adapter
from weft.models.decoder import Decoder
from weft.observe.status import alive
from weft.parallel.full_model import gather_weights, merges_adapter, new_full_model
from weft.train.auto_settings import DTYPES
from weft.train.job import Job

MOST_SEQUENCES = 256  # sequences per step of the engine


class Generated(NamedTuple):
    """New tokens of a prompt.

    Attributes:
        ids: token ids, with the stop token.
        logprobs: log-probability of each token at the temperature, over the complete vocabulary.
        complete: whether a stop token ended the continuation.
    """

    ids: list[int]
    logprobs: list[float]
    complete: bool


class Request(NamedTuple):
    """A prompt to continue. `copy` is the number of earlier continuations of the same prompt."""

    ids: list[int]
    sampling: Sampling
    copy: int


class Policy:
    """A full (unsharded) copy of the trained model on each rank, in the compute dtype, and its engine.

    The copy has merged weights in place of an adapter, unless the base model is quantized.

    Args:
        model: the sharded model.
        stop_ids: tokens that end a continuation.
    """

    def __init__(self, job: Job, model: nn.Module, stop_ids: Collection[int]):
        self.job, self.model = job, model
        config, device = job.config, job.world.device
        self.dtype = DTYPES[config.training.dtype]
        self.full = new_full_model(model, config.model, device, self.dtype).eval().requires_grad_(False)
        if device.type == "cpu" and os.environ.get("WEFT_COMPILE") != "0":
            # With an engine that compiles while it generates, a resumed run would not repeat the same numbers.
            with contextlib.suppress(OSError):  # no compiler
                library()
        self._filled = False
        blocks = -(-sequence_length(config) // BLOCK) + 1
        room = MOST_SEQUENCES * blocks
        if isinstance(self.full, Decoder):
            room = max(blocks, min(room, blocks_in_memory(self.full)))
        self.engine = Engine(self.full, stop_ids=stop_ids, max_batch=MOST_SEQUENCES, max_cache_tokens=room * BLOCK)

    def update(self) -> None:
        """Copies the weights of the trained model. Every rank must call it after the weights have changed.

        An adapter is merged with the weights each time. If its base model is quantized, the first call copies all
        weights, and later calls copy those of the adapter.
        """
        adapter = self.job.config.adapter
        select = is_adapter if self._filled and adapter is not None and not merges_adapter(adapter) else None
        gather_weights(self.model, self.full, self.job.world, self.dtype, everywhere=True, select=select)
        self._filled = True
        self.engine.clear()

    def generate(self, requests: Sequence[Request], stopping: Callable[[], bool]) -> list[Generated] | None:
        """Continues prompts. Each rank calls it with its own requests.

        Args:
            stopping: whether to stop early; it is called after each step of the engine.

        Returns:
            The new tokens of each prompt; None after an early stop.

        Raises:
            UserError: the logits are not finite.
        """
        streams = [self.engine.submit(one.ids, one.sampling, copy=one.copy) for one in requests]
        while self.engine.step():
            alive()
            if stopping():
                return None
        found = []
        for stream in streams:
            if stream.error is not None:
                raise stream.error
            pieces = stream.ready()
            tokens = [piece for piece in pieces if piece.token is not None]
            complete = bool(pieces) and pieces[-1].finish == "stop"
            found.append(Generated([p.token for p in tokens], [p.logprob for p in tokens], complete))  # pyright: ignore
        return found
