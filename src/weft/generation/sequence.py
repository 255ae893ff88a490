"""Defines the state of a sequence that the engine generates."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from weft.errors import UserError
from weft.generation.adapters import Adapter
from weft.generation.sampler import Choice, Context, with_logprobs
from weft.generation.stream import Finish, Stream

MOST_SCORED = 128  # tokens per step whose logits score prompts: logits of whole prompts can be larger than the model


@dataclass(eq=False)
class GeneratedSequence:
    """A prompt and its continuation, while the engine generates it.

    Attributes:
        tokens: ids of the prompt and of the continuation.
        index: index of this continuation among the `Sampling.n` continuations of its prompt.
        limit: number of tokens, with the prompt, at which the continuation ends.
        prompt: number of prompt tokens.
        rotary: text length for which the rotary embedding of the first `rotary` tokens is computed.
        adapter: the adapter of the request, or None.
        computed: number of tokens whose keys and values are in the cache.
        blocks: indices of the cache blocks; -1 for a released block, which is before all sliding windows.
        digests: digests of the complete blocks, from the first block.
        pending: digests of the blocks that this sequence is computing; also in `BlockPool.pending`.
        shares: whether the sequence can share blocks with other sequences.
        scores: the tokens of the prompt with their log-probabilities, so far; None: they are not wanted.
    """

    id: int
    tokens: list[int]
    stream: Stream
    index: int
    context: Context
    limit: int
    stop_ids: Collection[int] = ()
    adapter: Adapter | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    pending: list[bytes] = field(default_factory=list)
    shares: bool = True
    scores: list[Choice] | None = None

    def __post_init__(self):
        self.prompt = self.rotary = len(self.tokens)
        if self.context.sampling.prompt_logprobs:
            self.scores = [Choice(self.tokens[0])]
            self.shares = False  # the logits of shared tokens are not computed

    @property
    def unscored(self) -> bool:
        """Whether tokens of the prompt are still to be scored."""
        return self.scores is not None and len(self.scores) < self.prompt

    def score(self, logits: torch.Tensor, start: int) -> None:
        """Scores the tokens of the prompt that follow some of its tokens.

        Args:
            logits: the logits of these tokens, `[tokens, vocab]`.
            start: position of the first of them.
        """
        if self.scores is None or not len(logits):
            return
        following = self.tokens[start + 1 : start + 1 + len(logits)]
        # After a preemption, the first tokens are computed again.
        self.scores[start + 1 :] = with_logprobs(logits, following, [self.context.sampling] * len(following))

    def append(self, choice: Choice) -> bool:
        """Appends a new token to the sequence and to the stream. Returns whether the continuation has ended.

        Raises:
            UserError: no token could be chosen, or the constraint fails (see `Constraint.advance`).
        """
        if choice.failure is not None:
            raise UserError(choice.failure)
        self.tokens.append(choice.token)
        self.context = self.context._replace(allowed=None)
        finish: Finish | None = "length" if len(self.tokens) >= self.limit else None
        constraint, complete = self.context.constraint, False
        if choice.token in self.stop_ids:
            finish = "stop"
        elif constraint is not None and constraint.advance(self.tokens[self.prompt :]):
            finish, complete = "stop", True
        wanted = self.context.sampling.max_new_tokens
        if finish == "length" and len(self.tokens) < self.prompt + wanted:
            # The same text for all requests, so that Python prints it once.
            warnings.warn(
                f"a text ended at the maximum length of {self.limit:,} tokens, before {wanted:,} new tokens; set "
                "max_length if the model can continue longer texts",
                stacklevel=2,
            )
        prompt = self.scores or () if len(self.tokens) == self.prompt + 1 else ()
        return self.stream.put(self.index, choice, finish, complete=complete, prompt=prompt)

    @property
    def root(self) -> bytes:
        """The argument `parent` of `block_digest` for the first block. Differs between adapters, as cached keys do."""
        return b"" if self.adapter is None else self.adapter.root
