"""Defines `Engine`, which continues many prompts at once, with continuous batching (Yu et al., "Orca", 2022)."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import nn

from weft.config.model import ModelSection
from weft.data.tokenizers.tokenizer import Prompt, Tokenizer
from weft.errors import UserError
from weft.generation.adapters import Adapters, Deltas
from weft.generation.blocks import BlockPool, block_digest
from weft.generation.cache import BLOCK
from weft.generation.constraints import new_constraint
from weft.generation.limits import blocks_in_memory, check_prompts, encode_prompt, shares_blocks
from weft.generation.runners import Work, make_runner
from weft.generation.sampler import Choice, Context, choose, new_generator
from weft.generation.sequence import GeneratedSequence
from weft.generation.settings import Sampling
from weft.generation.stream import Stream
from weft.models.layers.rope import rotary_changes_at


class Engine:
    """Continues many prompts at once. Prompts can be added and cancelled at any time, from several threads.

    Each step runs one forward pass, which computes the next token of the sequences whose prompts are complete, and
    parts of other prompts. Sequences that begin with the same tokens share the cached keys and values of these tokens.
    If the cache is full, the sequence that was added last loses its cached keys and values, which are recomputed later.

    If the model is sharded, all ranks must make the same calls.

    >>> engine = weft.Engine(weft.load_model("runs/run"), weft.Tokenizer.load("tok"))
    >>> stream = engine.submit("Kalo mi", weft.Sampling(max_new_tokens=4, temperature=0))
    >>> "".join(piece.text for piece in stream) == weft.generate("runs/run", "Kalo mi", max_new_tokens=4)
    True

    Args:
        model: the model.
        tokenizer: decodes new tokens, which stop strings require; None: pieces have no text.
        stop_ids: tokens that end a continuation. The stream contains them, too.
        max_batch: maximum number of sequences per step.
        max_step_tokens: maximum number of tokens per step, which limits the memory of long prompts.
        max_cache_tokens: maximum number of tokens in the cache. Default: the number of tokens that fit in half of the
            free memory.
        cache: whether to use a key/value cache. Without a cache every step recomputes all tokens.
        batch_invariant: whether to run each sequence alone, in fixed chunks, so that a continuation is bitwise
            independent of other sequences.
        compile: whether a C function runs decoding steps on CPUs. None: once it is built, if possible. True: wait.

    Attributes:
        steps: number of steps.
        passes: number of forward passes, more than one per step with `batch_invariant`.
        computed_tokens: number of tokens that forward passes computed. Tokens found in the cache are not counted.
        shared_tokens: number of prompt tokens that were found in the cache.
        new_tokens: number of tokens that were generated.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer | None = None,
        *,
        stop_ids: Collection[int] = frozenset(),
        max_batch: int = 64,
        max_step_tokens: int = 2048,
        max_cache_tokens: int | None = None,
        cache: bool = True,
        batch_invariant: bool = False,
        compile: bool | None = None,
    ):
        self.model, self.tokenizer, self.stop_ids = model, tokenizer, frozenset(stop_ids)
        self.max_batch, self.max_step_tokens, self.batch_invariant = max_batch, max_step_tokens, batch_invariant
        self.runner = make_runner(model, cache=cache, apart=batch_invariant, compiled=compile)
        config = getattr(model, "config", None)
        self._scaling = config.rope_scaling if isinstance(config, ModelSection) else None
        paged = self.runner.cache
        # Keys that no layer sees any more are released, unless a layer has full attention.
        windows = [] if paged is None else paged.windows
        self._window = None if paged is None or None in windows else max(w for w in windows if w is not None)
        self.blocks, self._most = BlockPool(0), 0
        if paged is not None:
            self._most = blocks_in_memory(model) if max_cache_tokens is None else -(-max_cache_tokens // BLOCK)
        self.lock, self._adapters = threading.RLock(), Adapters()
        self._waiting: deque[GeneratedSequence] = deque()
        self._running: list[GeneratedSequence] = []
        self._ids = itertools.count()
        self.steps = self.passes = self.computed_tokens = self.shared_tokens = self.new_tokens = 0

    def submit(
        self,
        prompt: str | Prompt | Sequence[int],
        sampling: Sampling,
        *,
        stop_ids: Collection[int] | None = None,
        copy: int = 0,
        adapter: str | None = None,
    ) -> Stream:
        """Adds a prompt. Its continuation is generated while any stream of the engine is read.

        Args:
            prompt: text (which requires a tokenizer), a tokenized prompt or token ids.
            sampling: the settings.
            stop_ids: tokens that end the continuation. Default: the `stop_ids` of the engine.
            copy: number of earlier continuations of the same prompt, so that this one gets other random numbers.
            adapter: name of an adapter (see `add_adapter`); None: the model without an adapter.

        Raises:
            UserError: the prompt is empty, has tokens outside the vocabulary, or is too long for the model or the
                cache; stop strings or a constraint are given without a tokenizer; no text meets the constraint; or
                there is no such adapter.
        """
        ids, first = encode_prompt(prompt, sampling, self.tokenizer)
        self.check([ids], sampling)
        stop_ids = self.stop_ids if stop_ids is None else stop_ids
        stream = Stream(self, ids, sampling, self.tokenizer)
        with self.lock:
            for index in range(sampling.n):
                generator = new_generator(sampling.seed, copy + index, ids)
                constraint = new_constraint(sampling.constraint, self.tokenizer, stop_ids, first is not None)
                self._waiting.append(
                    GeneratedSequence(
                        next(self._ids),
                        list(ids),
                        len(ids),
                        sampling,
                        stream,
                        index,
                        Context(sampling, generator, ids, (), first, constraint),
                        stop_ids,
                        rotary=len(ids),
                        adapter=self._adapters.get(adapter),
                        shares=shares_blocks(self._scaling, len(ids) + sampling.max_new_tokens),
                    )
                )
        return stream

    def add_adapter(self, name: str, deltas: Deltas) -> None:
        """Adds an adapter, which `submit` takes by name. One step can compute prompts with different adapters.

        Args:
            deltas: name of a linear layer -> `weft.LowRank(a, b, scale)`, or a tuple of these values.

        Raises:
            UserError: the name is in use, or a delta has wrong shapes or names no linear layer.
        """
        with self.lock:
            self._adapters.add(self.model, name, deltas)

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter. Raises UserError if the adapter does not exist or an unfinished continuation uses it."""
        with self.lock:
            self._adapters.remove(name, [s.adapter for s in (*self._running, *self._waiting)])

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Raises UserError if a prompt is empty, is too long, or has tokens outside the vocabulary."""
        new_constraint(sampling.constraint, self.tokenizer, self.stop_ids)
        room = None if self.runner.cache is None else self._most * BLOCK
        check_prompts(self.model, prompts, sampling.max_new_tokens, room)

    def step(self) -> bool:
        """Runs one step, and adds the new tokens to the streams. Returns whether there are unfinished sequences."""
        with self.lock:
            works = self._plan()
            if works:
                self._run(works)
            return bool(self._waiting or self._running)

    def cancel(self, stream: Stream) -> None:
        """Ends the continuations of a stream, and frees their part of the cache."""
        with self.lock:
            for sequence in [s for s in (*self._running, *self._waiting) if s.stream is stream]:
                self._remove(sequence)
                stream.end(sequence.index)

    def clear(self) -> None:
        """Forgets cached keys and values of earlier prompts, for example because the model's weights have changed."""
        with self.lock:
            self.blocks.clear()

    def _plan(self) -> list[tuple[GeneratedSequence, Work]]:
        """Chooses the tokens that the next step computes, and allocates cache blocks for these tokens."""
        budget, works, preempted = self.max_step_tokens, [], len(self._waiting)
        # New tokens come before prompts, so that a long prompt does not interrupt other sequences.
        for sequence in sorted(self._running, key=lambda s: len(s.tokens) - s.computed > 1):
            if sequence in self._running and budget > 0:  # an earlier sequence can have preempted it
                budget -= self._add(sequence, budget, works)
        works = [(sequence, work) for sequence, work in works if sequence in self._running]
        preempted = len(self._waiting) > preempted
        while budget > 0 and self._waiting and not preempted and len(self._running) < self.max_batch:
            if not self._admit(self._waiting[0]):
                break
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            budget -= self._add(sequence, budget, works)
        return works

    def _add(self, sequence: GeneratedSequence, budget: int, works: list) -> int:
        """Appends the next tokens of a sequence to `works`. Returns the number of these tokens."""
        start, end = sequence.computed, len(sequence.tokens)
        if self.runner.chunks:
            if self.batch_invariant:  # the same chunks as without other sequences, also after a preemption
                budget = min(self.max_step_tokens, sequence.prompt - start) if start < sequence.prompt else 1
            end = min(end, start + budget)
        if not self._reserve(sequence, end):
            return 0
        kept = int(end == len(sequence.tokens))
        work = Work(sequence.id, sequence.tokens, start, end, sequence.rotary, kept, sequence.blocks, sequence.adapter)
        works.append((sequence, work))
        return end - start

    def _admit(self, sequence: GeneratedSequence) -> bool:
        """Looks up the cached blocks of a sequence's first tokens, which the sequence then shares.

        Returns:
            Whether the sequence can start now: there are enough free blocks for its other tokens, and no other sequence
            is computing a block that it could share.
        """
        if self.runner.cache is None:
            return True
        root, tokens, found = sequence.root, sequence.tokens, []
        if sequence.shares and not self.batch_invariant:
            for begin in range(0, len(tokens) - BLOCK, BLOCK):  # at least one token must be computed
                root = block_digest(root, tokens[begin : begin + BLOCK])
                if root in self.blocks.pending:
                    return False  # another sequence computes this block now
                if not self.blocks.contains(root):
                    break
                found.append(root)
        needed = -(-(len(tokens) + 1) // BLOCK) - len(found)
        shared = [self.blocks.share(digest) for digest in found]
        sequence.blocks = [block for block in shared if block is not None]
        self._grow(needed)
        if self.blocks.free < needed and self._running:
            self.blocks.release(sequence.blocks)
            sequence.blocks = []
            return False
        sequence.digests, sequence.computed = found, len(found) * BLOCK
        self.shared_tokens += sequence.computed
        if sequence.shares and not self.batch_invariant:
            parent = found[-1] if found else sequence.root
            for begin in range(len(found) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
                parent = block_digest(parent, tokens[begin : begin + BLOCK])
                sequence.pending.append(parent)
            self.blocks.pending.update(sequence.pending)
        return True

    def _reserve(self, sequence: GeneratedSequence, end: int) -> bool:
        """Gives a sequence blocks for its first `end` tokens. Preempts later sequences, or this one, if necessary."""
        if self.runner.cache is None:
            return True
        needed = -(-end // BLOCK) - len(sequence.blocks)
        self._grow(needed)
        while self.blocks.free < needed:
            last = self._running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        sequence.blocks.extend(self.blocks.take() for _ in range(needed))
        return True

    def _grow(self, needed: int) -> None:
        """Enlarges the cache, at most to its maximum size, if fewer than `needed` blocks are free."""
        have = len(self.blocks)
        if self.blocks.free >= needed or have == self._most or self.runner.cache is None:
            return
        blocks = min(self._most, max(2 * have, have + needed, 64))
        self.runner.cache.grow(blocks)
        self.blocks.grow(blocks)

    def _preempt(self, sequence: GeneratedSequence) -> None:
        """Frees the blocks of a running sequence. The sequence waits for free blocks, and is then recomputed."""
        self._remove(sequence)
        sequence.computed, sequence.digests = 0, []
        self._waiting.appendleft(sequence)

    def _remove(self, sequence: GeneratedSequence) -> None:
        """Removes a sequence from the engine, and frees its blocks."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self.blocks.pending.difference_update(sequence.pending)
        self.blocks.release([block for block in sequence.blocks if block >= 0])
        sequence.blocks, sequence.pending = [], []
        self.runner.forget(sequence.id)

    def _run(self, planned: list[tuple[GeneratedSequence, Work]]) -> None:
        try:
            logits = self.runner.forward([work for _, work in planned])
        except Exception as error:  # other sequences go on
            for sequence, _ in planned:
                self._remove(sequence)
                sequence.stream.error = error
            raise
        self.steps += 1
        self.passes += len(planned) if self.batch_invariant else 1
        ready, rows = [], []
        for (sequence, work), row in zip(planned, logits, strict=True):
            self.computed_tokens += work.end - work.start
            sequence.computed = work.end if self.runner.caches else 0
            self._publish(sequence)
            if work.kept:
                ready.append(sequence)
                rows.append(row[-1])
        if ready:
            contexts = [s.context._replace(new=s.tokens[s.prompt :]) for s in ready]
            for sequence, choice in zip(ready, choose(torch.stack(rows), contexts), strict=True):
                self._append(sequence, choice)

    def _append(self, sequence: GeneratedSequence, choice: Choice) -> None:
        """Adds a new token to a sequence, and ends the sequence if it is complete."""
        self.new_tokens += 1
        try:
            ended = sequence.append(choice)
        except UserError as error:  # other streams go on
            sequence.stream.error = error
            return self.cancel(sequence.stream)
        if ended:
            self._remove(sequence)
        elif self.runner.cache is not None and rotary_changes_at(self._scaling, len(sequence.tokens)):
            # The cached keys have the previous rotary embedding.
            self.blocks.release(sequence.blocks)
            sequence.blocks, sequence.digests, sequence.computed = [], [], 0
            sequence.rotary = len(sequence.tokens)

    def _publish(self, sequence: GeneratedSequence) -> None:
        """Records the digests of a sequence's complete blocks, and releases blocks that no window reaches any more."""
        if self.runner.cache is None:
            return
        if sequence.shares and not self.batch_invariant:
            while (len(sequence.digests) + 1) * BLOCK <= sequence.computed:
                begin = len(sequence.digests) * BLOCK
                parent = sequence.digests[-1] if sequence.digests else sequence.root
                digest = block_digest(parent, sequence.tokens[begin : begin + BLOCK])
                self.blocks.publish(sequence.blocks[begin // BLOCK], digest)
                sequence.digests.append(digest)
        if self._window is not None:
            for i in range(max(0, sequence.computed - self._window + 1) // BLOCK):
                if sequence.blocks[i] >= 0:
                    self.blocks.release([sequence.blocks[i]])
                    sequence.blocks[i] = -1
