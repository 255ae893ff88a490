"""Runs the forward passes of generation, for each kind of model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from weft.errors import UserError
from weft.generation.adapters import Adapter, adapted
from weft.generation.cache import Chunk, PagedCache, paged_cache
from weft.generation.compiled_step import CompiledDecoding
from weft.models.decoder import Decoder
from weft.models.forward import forward_of
from weft.parallel.model_state import state_of


@dataclass
class Work:
    """The tokens of one sequence that a forward pass computes.

    Attributes:
        sequence: id of the sequence, the same in all forward passes.
        tokens: token ids of the sequence before position `end`. The last `kept` - 1 can be proposals
            (`speculative.py`).
        start: position of the first token to compute. Earlier tokens are in the cache.
        end: position after the last token to compute.
        rotary: text length for which the rotary embedding of the first `rotary` tokens is computed. Some RoPE scalings
            depend on the length of the text.
        kept: number of tokens before position `end` whose logits choose new tokens.
        scored: number of tokens before these whose logits are returned, too: they score the prompt's next tokens.
        blocks: the sequence's blocks in a paged cache.
        adapter: the adapter of the sequence, or None.
    """

    sequence: int
    tokens: list[int]
    start: int
    end: int
    rotary: int
    kept: int = 1
    blocks: Sequence[int] = field(default_factory=list)
    adapter: Adapter | None = None
    scored: int = 0

    @property
    def returned(self) -> int:
        """Number of tokens before position `end` whose logits are returned."""
        return self.scored + self.kept


class Runner(Protocol):
    """Computes logits for sequences.

    Attributes:
        caches: whether earlier tokens of a sequence are cached. If not, `Work.start` must be 0.
        chunks: whether several forward passes can compute a prompt, each a chunk of it.
    """

    caches: bool
    chunks: bool

    @property
    def cache(self) -> PagedCache | None:
        """The paged cache, or None."""
        ...

    def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Runs a forward pass. Returns for each work the logits of its last `returned` tokens, `[tokens, vocab]`."""
        ...

    def forget(self, sequence: int) -> None:
        """Frees the memory that the runner keeps for a sequence outside of the paged cache."""
        ...


def make_runner(model: nn.Module, *, cache: bool = True, apart: bool = False, compiled: bool | None = None) -> Runner:
    """Creates the runner for a model.

    Args:
        model: the model.
        cache: whether to use a key/value cache, if the model has one.
        apart: whether to run each sequence alone, so that the results of a sequence do not depend on other sequences.
        compiled: whether to compile decoding steps (see `CompiledDecoding`).

    Raises:
        UserError: `compiled` is True, but decoding steps of this model cannot be compiled; or it is a reward model.
    """
    if isinstance(model, Decoder) and model.config.num_labels:
        raise UserError(
            "this is a reward model (num_labels: 1), which cannot generate; use the model that it started from"
        )
    if cache and isinstance(model, Decoder):
        return PagedRunner(model, apart, compiled)
    if compiled:
        raise UserError("compile=True needs a built-in decoder with a cache; use compile=None")
    if cache and getattr(model, "takes_cache", False):
        return TransformersRunner(model)
    return UncachedRunner(model, apart)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in eval mode. Restores the model's mode at the end."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in eval mode and gradients are disabled."""
    # FSDP keeps the parameters that it all-gathers, and training cannot use tensors created in inference mode.
    sharded = hasattr(model, "unshard") or hasattr(model, "stages")  # or its pipeline stages
    # Layers compiled for training have fixed shapes, but in generation every step has another shape.
    # Without the compiler, no layer is compiled. Importing it on a CPU would delay the first answer by 0.6 s.
    cpu = next(model.parameters()).device.type == "cpu"
    compiler = "torch._dynamo" in sys.modules or not cpu
    eager = torch.compiler.set_stance("force_eager") if compiler else nullcontext()
    with eval_mode(model), torch.no_grad() if sharded else torch.inference_mode(), eager:
        yield


def shards_of(model: nn.Module) -> int:
    """Returns the number of `tp` ranks, which shard key/value heads and sequences.

    Sequence lengths must be multiples of this number.
    """
    state = state_of(model)
    return 1 if state is None else state.world.shape.tp


class PagedRunner:
    """Runs a decoder with a paged cache. The tokens of all sequences form one row."""

    caches = chunks = True

    def __init__(self, model: Decoder, apart: bool = False, compiled: bool | None = False):
        self.model, self.apart = model, apart
        self.cache: PagedCache = paged_cache(model, apart)
        self.decoding = CompiledDecoding(model, self.cache, compiled, wait=apart)

    def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Implements `Runner.forward`."""
        found: dict[int, torch.Tensor] = {}
        if chosen := self.decoding.chosen(works):
            found = dict(zip(chosen, self.decoding.forward([works[i] for i in chosen]), strict=True))
        rest = [i for i in range(len(works)) if i not in found]
        for group in [[i] for i in rest] if self.apart else [rest] * bool(rest):
            found.update(zip(group, self._forward([works[i] for i in group]), strict=True))
        return [found[i] for i in range(len(works))]

    def _forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        device = next(self.model.parameters()).device
        with inference(self.model):
            order = self.cache.begin([Chunk(work.blocks, work.start, work.end) for work in works], device)
            ordered = [works[i] for i in order]
            tokens = [token for work in ordered for token in work.tokens[work.start : work.end]]
            positions = [position for work in ordered for position in range(work.start, work.end)]
            lengths = [max(work.rotary, p + 1) for work in ordered for p in range(work.start, work.end)]
            padding = -len(tokens) % shards_of(self.model)
            for values, value in ((tokens, 0), (positions, 0), (lengths, 1)):
                values.extend([value] * padding)
            kept, row = [], 0
            for work in ordered:
                row += work.end - work.start
                kept.extend(range(row - work.returned, row))
            rows = [torch.tensor([x], device=device) for x in (tokens, positions, lengths)]
            with adapted(self.model, [(work.adapter, work.end - work.start) for work in ordered]):
                logits = self.model(
                    tokens=rows[0],
                    positions=rows[1],
                    lengths=rows[2],
                    cache=self.cache,
                    logits_to_keep=torch.tensor(kept, device=device, dtype=torch.long),
                )[0]
        parts = logits.split([work.returned for work in ordered])
        found = dict(zip(order, parts, strict=True))
        return [found[i] for i in range(len(works))]

    def forget(self, sequence: int) -> None:
        """Implements `Runner.forget`."""


class TransformersRunner:
    """Runs a Transformers model with a Transformers cache. Each sequence has its own forward pass, without padding."""

    caches, chunks, cache = True, False, None

    def __init__(self, model: Any):
        self.model = model
        self._caches: dict[int, Any] = {}

    def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Implements `Runner.forward`."""
        device, logits = next(self.model.parameters()).device, []
        with inference(self.model):
            for work in works:
                if work.start == 0:
                    self._caches[work.sequence] = self.model.new_cache()
                row = torch.arange(work.start, work.end, device=device).unsqueeze(0)
                tokens = torch.tensor([work.tokens[work.start : work.end]], device=device)
                with adapted(self.model, [(work.adapter, row.numel())]):
                    out = self.model(tokens=tokens, positions=row, cache=self._caches[work.sequence])
                logits.append(out[0, out.shape[1] - work.returned :])
        return logits

    def forget(self, sequence: int) -> None:
        """Implements `Runner.forget`."""
        self._caches.pop(sequence, None)


class UncachedRunner:
    """Runs a model without a cache: each step recomputes all tokens. Sequences are right-padded to one length."""

    caches, chunks, cache = False, False, None

    def __init__(self, model: nn.Module, apart: bool = False):
        self.model, self.apart, self._call = model, apart, forward_of(model)

    def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Implements `Runner.forward`."""
        if self.apart and len(works) > 1:
            return [self.forward([work])[0] for work in works]
        device, width = next(self.model.parameters()).device, max(work.end for work in works)
        width += -width % shards_of(self.model)
        rows = [[*work.tokens[: work.end], *[0] * (width - work.end)] for work in works]
        tokens = torch.tensor(rows, device=device)
        ends = torch.tensor([[work.end] for work in works], device=device)
        positions = torch.minimum(torch.arange(width, device=device), ends - 1)
        with inference(self.model), adapted(self.model, [(work.adapter, width) for work in works]):
            logits = self._call({"tokens": tokens, "positions": positions})
        return [row[work.end - work.returned : work.end] for row, work in zip(logits, works, strict=True)]

    def forget(self, sequence: int) -> None:
        """Implements `Runner.forget`."""
