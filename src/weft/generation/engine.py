"""Defines `Engine`, which continues many prompts at once, with continuous batching (Yu et al., "Orca", 2022)."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter, deque
from collections.abc import Collection, Sequence
from pathlib import Path

from torch import nn

from weft.config.model import ModelSection
from weft.data.tokenizers.tokenizer import Prompt, Tokenizer
from weft.errors import UserError
from weft.generation.adapters import Adapters, Deltas, check_base
from weft.generation.allocation import BlockAllocator
from weft.generation.cache import BLOCK
from weft.generation.constraints import new_constraint
from weft.generation.limits import blocks_in_memory, check_prompts, encode_prompt, shares_blocks
from weft.generation.runners import Work, make_runner
from weft.generation.sampler import NOT_FINITE, Choice, Context, new_generator
from weft.generation.sequence import MOST_SCORED, GeneratedSequence
from weft.generation.settings import Sampling
from weft.generation.speculative import make_proposer
from weft.generation.stream import Stream
from weft.generation.verification import choose_tokens
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
        stop_ids: tokens that end a continuation. The stream yields these tokens, too.
        max_batch: maximum number of sequences per step.
        max_step_tokens: maximum number of tokens per step, which limits the memory of long prompts.
        max_cache_tokens: maximum number of tokens in the cache. Default: the number of tokens that fit in half of the
            free memory.
        cache: whether to use a key/value cache. Without a cache every step recomputes all tokens.
        batch_invariant: whether to run each sequence alone, in fixed chunks, so that a continuation is bitwise
            independent of other sequences.
        compile: whether a compiled C function runs decoding steps on CPUs. None: runs them if possible, as soon as the
            function is compiled. True: waits for the compiler, and raises UserError if the function cannot be used.
        draft: a smaller model with the same tokenizer, which proposes tokens (speculative decoding); None: no model.
        draft_tokens: number of tokens that the draft model proposes per sequence and step. Default: 4.
        lookup: maximum number of tokens that are proposed per sequence and step because they followed the last
            occurrence of the sequence's last 3 or 2 tokens (prompt look-up); 0: none.

    Attributes:
        adapters: the adapters.
        running, waiting: the unfinished sequences, with and without cache blocks.
        capacity: maximum number of tokens in the cache; None: there is no cache.
        steps: number of steps.
        passes: number of forward passes, more than one per step with `batch_invariant`.
        computed_tokens: number of tokens that forward passes computed. Tokens found in the cache are not counted.
        shared_tokens: number of prompt tokens that were found in the cache.
        new_tokens: number of tokens that were generated.
        proposed_tokens: number of tokens that `draft` or `lookup` proposed.
        accepted_tokens: number of these tokens that the model accepted.
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
        draft: nn.Module | None = None,
        draft_tokens: int | None = None,
        lookup: int = 0,
    ):
        self.model, self.tokenizer, self.stop_ids = model, tokenizer, frozenset(stop_ids)
        for name, value in (("max_batch", max_batch), ("max_step_tokens", max_step_tokens)):
            if value < 1:
                raise UserError(f"{name} is {value}; set it to at least 1")
        self.max_batch, self.max_step_tokens, self.batch_invariant = max_batch, max_step_tokens, batch_invariant
        self.runner = make_runner(model, cache=cache, apart=batch_invariant, compiled=compile)
        self.proposer = make_proposer(model, self.runner, batch_invariant, draft, draft_tokens, lookup, max_step_tokens)
        models = (model, *self.proposer.models)
        configs = [getattr(one, "config", None) for one in models]
        self._scalings = [c.rope_scaling if isinstance(c, ModelSection) else None for c in configs]
        caches = [one.cache for one in (self.runner, *self.proposer.runners) if one.cache is not None]
        fixed = max_cache_tokens is not None or not caches
        most = -(-(max_cache_tokens or 0) // BLOCK) if fixed else blocks_in_memory(*models)
        self._allocator = BlockAllocator(caches, most, share=not batch_invariant)
        self.blocks = self._allocator.pool
        self.capacity = None if self.runner.cache is None else self._allocator.most * BLOCK
        self.lock, self.adapters = threading.RLock(), Adapters()
        self.waiting: deque[GeneratedSequence] = deque()
        self.running: list[GeneratedSequence] = []
        self._ids = itertools.count()
        self.steps = self.passes = self.computed_tokens = self.shared_tokens = self.new_tokens = 0
        self.proposed_tokens = self.accepted_tokens = 0

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
            copy: number of earlier continuations of the same prompt. Each value gives different random numbers.
            adapter: name of an adapter (see `add_adapter`); None: the model without an adapter.

        Raises:
            UserError: the prompt is empty, has tokens outside the vocabulary, or is too long for the model or the
                cache; stop strings or a constraint are given without a tokenizer; no text meets the constraint; or
                there is no such adapter.
        """
        return self.submit_all([prompt], sampling, stop_ids=stop_ids, copy=copy, adapter=adapter)[0]

    def submit_all(
        self,
        prompts: Sequence[str | Prompt | Sequence[int]],
        sampling: Sampling,
        *,
        stop_ids: Collection[int] | None = None,
        copy: int = 0,
        adapter: str | None = None,
    ) -> list[Stream]:
        """Adds several prompts, or none if one is refused. Equal prompts get different random numbers. See `submit`."""
        encoded = [encode_prompt(prompt, sampling, self.tokenizer) for prompt in prompts]
        if not encoded:
            return []
        longest = check_prompts(self.model, [ids for ids, _ in encoded], sampling, self.capacity)
        stop_ids = self.stop_ids if stop_ids is None else stop_ids
        streams, added, equal = [], [], Counter()
        with self.lock:
            for ids, first in encoded:
                streams.append(Stream(self, ids, sampling, self.tokenizer))
                limit = min(len(ids) + sampling.max_new_tokens, longest or sys.maxsize)
                self.proposer.check(limit)
                shares = all(shares_blocks(scaling, limit) for scaling in self._scalings)
                for index in range(sampling.n):
                    generator = new_generator(sampling.seed, copy + equal[tuple(ids)] + index, ids)
                    constraint = new_constraint(sampling.constraint, self.tokenizer, stop_ids, first is not None)
                    context = Context(sampling, generator, ids, (), first, constraint)
                    given = (list(ids), streams[-1], index, context, limit, stop_ids, self.adapters.get(adapter))
                    added.append(GeneratedSequence(next(self._ids), *given, shares=shares))
                equal[tuple(ids)] += 1
            self.waiting.extend(added)
        return streams

    def add_adapter(self, name: str, deltas: Deltas | str | Path) -> None:
        """Adds an adapter. One step can compute prompts with different adapters.

        Args:
            name: name of the adapter, to pass to `submit`.
            deltas: path of a folder that PEFT's `save_pretrained` wrote, or of a run with an adapter; or name of a
                linear layer -> `weft.LowRank(a, b, scale)`, or a tuple of these values.

        Raises:
            UserError: the name is in use, the model has an adapter already, a key of `deltas` is not the name of a
                linear layer, a matrix has a wrong shape, or the adapter in the folder does not fit the model or was
                trained on another base model (checked for models from `weft.load_model`).
        """
        check_base(self.model, deltas)  # before the lock: hashing takes as long as loading
        with self.lock:
            self.adapters.add(self.model, name, deltas)

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter. Raises UserError if the adapter does not exist or an unfinished continuation uses it."""
        with self.lock:
            self.adapters.remove(name, [s.adapter for s in (*self.running, *self.waiting)])

    def step(self) -> bool:
        """Runs one step, and adds the new tokens to the streams. Returns whether there are unfinished sequences."""
        with self.lock:
            if works := self._plan():
                self._run(works)
            return bool(self.waiting or self.running)

    def cancel(self, stream: Stream) -> None:
        """Ends the unfinished continuations of a stream, and frees their cache blocks."""
        with self.lock:
            for sequence in self._remove_all(stream):
                stream.end(sequence.index)

    def clear(self) -> None:
        """Forgets cached keys and values of earlier prompts, for example because the model's weights have changed."""
        with self.lock:
            self._allocator.clear()

    def _plan(self) -> list[tuple[GeneratedSequence, Work]]:
        """Chooses the tokens that the next step computes, and allocates cache blocks for these tokens."""
        budget, works, waiting = self.max_step_tokens, [], len(self.waiting)
        # New tokens come before prompts, so that a long prompt does not interrupt other sequences.
        for sequence in sorted(self.running, key=lambda s: len(s.tokens) - s.computed > 1):
            if sequence in self.running and budget > 0:  # an earlier sequence can have preempted it
                budget -= self._add(sequence, budget, works)
        works = [(sequence, work) for sequence, work in works if sequence in self.running]
        preempted = len(self.waiting) > waiting
        while budget > 0 and self.waiting and not preempted and len(self.running) < self.max_batch:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            budget -= self._add(sequence, budget, works)
        return works

    def _add(self, sequence: GeneratedSequence, budget: int, works: list) -> int:
        """Appends a `Work` with the next tokens of a sequence to `works`. Returns the number of these tokens.

        Args:
            budget: number of tokens that the step can still compute.
        """
        start, length = sequence.computed, len(sequence.tokens)
        most = min(self.proposer.tokens, sequence.limit - length - 1) if sequence.shares else 0
        end = length
        if self.runner.chunks:
            if self.batch_invariant:  # the same chunks as without other sequences, also after a preemption
                budget = min(self.max_step_tokens, sequence.prompt - start) if start < sequence.prompt else 1
                budget += most
            if sequence.unscored:
                scored = sum(work.scored for _, work in works)
                budget = min(budget, 0 if self.batch_invariant and scored else MOST_SCORED - scored)
            end = min(end, start + budget)
            # The budget depends on other sequences, so the number of proposals must not depend on the budget.
            if end == length and end + most > start + budget:
                end -= 1
        tokens, kept = sequence.tokens, int(end == length)
        if most and kept:
            tokens = tokens + self.proposer.propose(sequence.id, tokens, most)
            end, kept = len(tokens), 1 + len(tokens) - length
        if end == start or not self._reserve(sequence, end):
            return 0
        work = Work(sequence.id, tokens, start, end, sequence.rotary, kept, sequence.blocks, sequence.adapter)
        work.scored = min(end, sequence.prompt - 1) - start if sequence.unscored else 0
        works.append((sequence, work))
        return end - start

    def _admit(self, sequence: GeneratedSequence) -> bool:
        """Looks up the cached blocks of a sequence's first tokens. Returns whether the sequence can start now."""
        # Proposals would change the chunks after a preemption, so batch-invariant sequences get all blocks at once.
        take = self.batch_invariant and self.proposer.tokens > 0
        length = sequence.limit if take else len(sequence.tokens) + 1 + self.proposer.tokens
        if not self._allocator.admit(sequence, length, take=take, wait=bool(self.running)):
            return False
        self.shared_tokens += sequence.computed
        self.proposer.begin(sequence.id, sequence.computed)
        return True

    def _reserve(self, sequence: GeneratedSequence, end: int) -> bool:
        """Gives a sequence blocks for its first `end` tokens. Preempts later sequences, or this one, if necessary."""
        while not self._allocator.reserve(sequence, end):
            last = self.running[-1]
            self._remove(last)
            self.waiting.appendleft(last)  # it waits for free blocks, and is then recomputed
            if last is sequence:
                return False
        return True

    def _remove(self, sequence: GeneratedSequence) -> None:
        """Removes a sequence from the engine, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._allocator.release(sequence)
        self.runner.forget(sequence.id)
        self.proposer.forget(sequence.id)

    def _remove_all(self, stream: Stream) -> list[GeneratedSequence]:
        """Removes and returns the unfinished sequences of a stream."""
        found = [sequence for sequence in (*self.running, *self.waiting) if sequence.stream is stream]
        for sequence in found:
            self._remove(sequence)
        return found

    def _run(self, planned: list[tuple[GeneratedSequence, Work]]) -> None:
        works = [work for _, work in planned]
        contexts = [s.context._replace(new=s.tokens[s.prompt :]) for s, _ in planned]
        try:
            drafts = self.proposer.draft(works, contexts)
            logits = self.runner.forward(works)
            for (sequence, work), rows in zip(planned, logits, strict=True):
                sequence.score(rows[: work.scored], work.start)
            chosen = choose_tokens(logits, contexts, works, drafts)
        except Exception as error:  # other sequences go on
            for sequence, _ in planned:
                sequence.stream.error = error
                self._remove_all(sequence.stream)
            raise
        self.steps += 1
        self.passes += len(planned) if self.batch_invariant else 1
        self.computed_tokens += sum(work.end - work.start for work in works)
        for (sequence, work), choices in zip(planned, chosen, strict=True):
            if sequence not in self.running:  # cancelled with its stream
                continue
            if not work.kept:
                self._publish(sequence, work.end)
                continue
            self.proposed_tokens += work.kept - 1
            self.accepted_tokens += len(choices) - 1
            for choice in choices:
                self._publish(sequence, len(sequence.tokens))
                if self._append(sequence, choice):
                    break

    def _append(self, sequence: GeneratedSequence, choice: Choice) -> bool:
        """Adds a new token to a sequence, and ends a complete sequence. Returns whether the sequence has ended."""
        self.new_tokens += 1
        try:
            ended = sequence.append(choice)
        except UserError as error:  # other streams go on
            sequence.stream.error = error
            self._remove_all(sequence.stream)
            if choice.failure == NOT_FINITE:
                self.clear()  # the next sequence must not find NaN in its blocks
            return True
        if ended:
            self._remove(sequence)
        elif self.runner.cache is not None and rotary_changes_at(self._scalings[0], len(sequence.tokens)):
            self._allocator.release(sequence)  # the cached keys have the previous rotary embedding
            sequence.rotary = len(sequence.tokens)
        return ended

    def _publish(self, sequence: GeneratedSequence, computed: int) -> None:
        """Records that the keys and values of a sequence's first `computed` tokens are computed."""
        sequence.computed = computed if self.runner.caches else 0
        self._allocator.publish(sequence, self.proposer.covered(sequence.id, computed))
