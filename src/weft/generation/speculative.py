"""Proposes tokens for speculative decoding (Leviathan et al., 2023; Chen et al., 2023).

One forward pass of the model verifies all tokens that are proposed for a sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ProxyTypes

import torch
from torch import nn

from weft.checkpoint.load import tokenizer_folder
from weft.checkpoint.load_model import checkpoint_of
from weft.errors import UserError
from weft.generation.limits import check_length
from weft.generation.runners import Runner, Work, make_runner
from weft.generation.sampler import NOT_FINITE, Context, choose_ids, find_failures, probabilities, process
from weft.generation.verification import context_after, draw_ids
from weft.headers import read_tokenizer
from weft.models.decoder import Decoder
from weft.models.layers.rope import rotary_depends_on_length

LONGEST, SHORTEST = 3, 2  # lengths of the n-grams of `PromptLookup`


class Proposer:
    """The base class of proposers, which propose the next tokens of sequences. This class proposes no tokens.

    The proposals for a sequence depend only on this sequence's tokens and random generator.

    Attributes:
        tokens: maximum number of proposed tokens per sequence and step.
        models: the draft models; empty if tokens are proposed without a model.
        runners: the runner of each draft model.
    """

    def __init__(self, tokens: int = 0):
        self.tokens = tokens
        self.models: list[Decoder] = []
        self.runners: list[Runner] = []

    def propose(self, sequence: int, tokens: Sequence[int], most: int) -> list[int]:
        """Returns at most `most` tokens that may follow `tokens`. `draft` can later replace or remove these proposals.

        Args:
            sequence: id of the sequence (`Work.sequence`).
            tokens: all tokens of the sequence.
            most: maximum number of proposals.
        """
        return []

    def draft(self, works: Sequence[Work], contexts: Sequence[Context]) -> list[torch.Tensor | None]:
        """Replaces or removes the proposals at the end of each `Work`, before the model verifies them.

        Returns:
            For each sequence, the probabilities `[proposals, vocab]` from which its proposals were drawn; None if its
            proposals were not drawn at random.
        """
        return [None] * len(works)

    def check(self, length: int) -> None:
        """Raises UserError if sequences of `length` tokens are not supported."""

    def begin(self, sequence: int, computed: int) -> None:
        """Adds a sequence. Its first `computed` tokens are already in the caches of all models."""

    def covered(self, sequence: int, computed: int) -> int:
        """Returns how many of a sequence's first `computed` tokens are in the caches of all models.

        These tokens must be final: not proposals that the model can still reject.
        """
        return computed

    def forget(self, sequence: int) -> None:
        """Removes the proposer's state of a sequence."""


@dataclass
class _NGrams:
    """The n-grams of a sequence.

    Attributes:
        ends: n-gram -> position of the token that follows the n-gram's last occurrence.
        length: number of tokens of the sequence whose n-grams are in `ends`.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    length: int = 0


class PromptLookup(Proposer):
    """Proposes the tokens that followed the sequence's last 3 or 2 tokens when they last occurred in the sequence.

    This is prompt look-up (Saxena, "Prompt lookup decoding", 2023).

    Args:
        tokens: maximum number of proposed tokens.
    """

    def __init__(self, tokens: int):
        super().__init__(tokens)
        self._sequences: dict[int, _NGrams] = {}

    def propose(self, sequence: int, tokens: Sequence[int], most: int) -> list[int]:
        """Implements `Proposer.propose`."""
        known, length = self._sequences.setdefault(sequence, _NGrams()), len(tokens)
        for end in range(max(known.length, SHORTEST), length):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                known.ends[tuple(tokens[end - n : end])] = end
        known.length = length
        for n in range(min(LONGEST, length), SHORTEST - 1, -1):
            begin = known.ends.get(tuple(tokens[length - n :]))
            if begin is not None:  # tokens behind the end repeat the period
                return [tokens[begin + i % (length - begin)] for i in range(most)]
        return []

    def draft(self, works: Sequence[Work], contexts: Sequence[Context]) -> list[torch.Tensor | None]:
        """Implements `Proposer.draft`. Removes proposals that the constraint of a sequence does not allow."""
        for work, context in zip(works, contexts, strict=True):
            if context.constraint is not None and work.kept > 1:
                proposals = work.tokens[work.end - work.kept + 1 :]
                allowed = context.constraint.count_allowed(context.new, proposals)
                while allowed and not _continues(
                    context_after(context, proposals[: allowed - 1]), proposals[allowed - 1]
                ):
                    allowed -= 1
                _shorten(work, len(proposals) - allowed)
        return super().draft(works, contexts)

    def forget(self, sequence: int) -> None:
        """Implements `Proposer.forget`."""
        self._sequences.pop(sequence, None)


class DraftModel(Proposer):
    """Proposes tokens that a smaller model generates.

    The smaller model has its own cache. A sequence's blocks have the same indices in this cache as in the cache of the
    model that verifies.

    Args:
        model: the model that proposes tokens.
        tokens: maximum number of proposed tokens.
        apart: whether to run each sequence alone.
    """

    def __init__(self, model: Decoder, tokens: int, apart: bool):
        super().__init__(tokens)
        self._runner = make_runner(model, apart=apart)
        self.models, self.runners = [model], [self._runner]
        self._computed: dict[int, int] = {}  # number of tokens of each sequence that are in the cache

    def propose(self, sequence: int, tokens: Sequence[int], most: int) -> list[int]:
        """Implements `Proposer.propose`."""
        return [0] * most

    def draft(self, works: Sequence[Work], contexts: Sequence[Context]) -> list[torch.Tensor | None]:
        """Implements `Proposer.draft`. Also fills the draft model's cache with the earlier tokens of each `Work`."""
        counts = [max(work.kept - 1, 0) for work in works]
        drawn: list[list[torch.Tensor]] = [[] for _ in works]
        for work in works:  # rejected tokens are computed again
            self._computed[work.sequence] = min(self._computed[work.sequence], work.start)
        for step in range(max(1, *counts)):
            rows = [i for i, count in enumerate(counts) if step == 0 or step < count]
            steps = []
            for work, count in ((works[i], counts[i]) for i in rows):
                start, end = self._computed[work.sequence], work.end - count + step
                kept = int(step < count)
                steps.append(Work(work.sequence, work.tokens, start, end, work.rotary, kept, work.blocks))
                self._computed[work.sequence] = end
            logits = [each for each in self._runner.forward(steps) if len(each)]
            rows = [i for i in rows if step < counts[i]]
            if not rows:
                break
            after = [context_after(contexts[i], works[i].tokens[works[i].end - counts[i] :][:step]) for i in rows]
            for i, context, token, each in zip(rows, after, *_choose_drafts(torch.cat(logits), after), strict=True):
                if token is None or not _continues(context, token):
                    _shorten(works[i], counts[i] - step)
                    counts[i] = step
                    continue
                works[i].tokens[works[i].end - counts[i] + step] = token
                drawn[i] += [] if each is None else [each]
        return [torch.stack(each) if each else None for each in drawn]

    def check(self, length: int) -> None:
        """Implements `Proposer.check`."""
        remedy = "shorten the prompt or generate fewer tokens"
        check_length(self.models[0], length, "for the draft model, prompt and new tokens need", remedy)

    def begin(self, sequence: int, computed: int) -> None:
        """Implements `Proposer.begin`."""
        self._computed[sequence] = computed

    def covered(self, sequence: int, computed: int) -> int:
        """Implements `Proposer.covered`."""
        return min(computed, self._computed[sequence])

    def forget(self, sequence: int) -> None:
        """Implements `Proposer.forget`."""
        self._computed.pop(sequence, None)


def make_proposer(
    model: nn.Module,
    runner: Runner,
    apart: bool,
    draft: nn.Module | None,
    draft_tokens: int | None,
    lookup: int,
    max_step_tokens: int,
) -> Proposer:
    """Creates the proposer of an engine, and checks that the model can verify its proposals.

    Args:
        model: the model that verifies the proposals.
        runner: the runner of `model`.
        apart: whether to run each sequence alone.
        draft, draft_tokens, lookup, max_step_tokens: as in `Engine`.

    Raises:
        UserError: the settings contradict each other, or the model or the draft model is not supported.
    """
    if draft is None and draft_tokens is not None:
        raise UserError(f"draft_tokens is {draft_tokens}, but there is no draft model; remove it, or set draft")
    if draft is None and lookup == 0:
        return Proposer()
    if draft is not None and lookup:
        raise UserError(f"both a draft model and lookup ({lookup}) are given; give one of them")
    name, tokens = ("draft_tokens", 4 if draft_tokens is None else draft_tokens) if draft else ("lookup", lookup)
    if not 1 <= tokens < max_step_tokens:
        raise UserError(f"{name} is {tokens}; set it to a number from 1 to {max_step_tokens - 1} (max_step_tokens - 1)")
    if runner.cache is None:
        raise UserError(
            "a draft model or lookup needs a built-in model with a cache; remove it for custom models, for models of "
            "type hf, and without a cache"
        )
    if draft is not None and not isinstance(draft, Decoder):
        raise UserError("the draft model is a custom model or of type hf; use a built-in model")
    for one in (model, draft):
        scaling = one.config.rope_scaling if isinstance(one, Decoder) else None
        if scaling is not None and rotary_depends_on_length(scaling):
            limit = scaling.original_max_position_embeddings
            warnings.warn(
                f"no tokens are proposed for texts that can exceed {limit} tokens: their rotary embedding "
                f"({scaling.rope_type}) changes with the length",
                stacklevel=3,
            )
    if draft is None:
        return PromptLookup(tokens)
    check_vocabulary(model, draft)
    return DraftModel(draft, tokens, apart)


def check_vocabulary(model: Any, draft: Any) -> None:
    """Raises UserError if the vocabulary sizes of the models, or the tokenizers of their checkpoints, differ."""
    sizes = [one.config.vocab_size for one in (model, draft)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the draft model's vocabulary has {sizes[1]:,} tokens, the model's {sizes[0]:,}; use a draft model with "
            "the same tokenizer"
        )
    if isinstance(model, ProxyTypes):
        return  # `engine_of` checks its model
    mine, other = (tokenizer_folder(found) if (found := checkpoint_of(one)) else None for one in (model, draft))
    if mine and other and read_tokenizer(mine)[0].digest != read_tokenizer(other)[0].digest:
        raise UserError(
            f"this tokenizer of the draft model differs from the model's tokenizer {mine}; use a draft model with the "
            "same tokenizer",
            other,
        )


def _continues(context: Context, token: int) -> bool:
    """Whether the constraint of a sequence allows further tokens after `token`.

    The constraint must allow `token` itself.
    """
    try:
        return context.constraint is None or not context.constraint.advance([*context.new, token])
    except UserError:  # no token can follow
        return False


def _shorten(work: Work, count: int) -> None:
    """Removes the last `count` proposed tokens from the work of a sequence."""
    del work.tokens[work.end - count :]
    work.end, work.kept = work.end - count, work.kept - count


def _choose_drafts(
    logits: torch.Tensor, contexts: Sequence[Context]
) -> tuple[list[int | None], list[torch.Tensor | None]]:
    """Chooses a token for each row of a draft model's logits.

    Returns:
        The tokens, None if the settings forbid every token; and for each token the probabilities `[vocab]` from which
        it was drawn, None for greedy decoding.

    Raises:
        UserError: logits are NaN or infinite.
    """
    processed = process(logits, contexts)
    failures = find_failures(logits, processed)
    if NOT_FINITE in failures.values():
        raise UserError("the draft model's logits are NaN or infinite; check its weights, or generate without a draft")
    drawn: list[torch.Tensor | None] = [None] * len(contexts)

    def draw_some(some: torch.Tensor, rows: list[int], settings: tuple) -> torch.Tensor:
        each = probabilities(some, contexts[rows[0]].sampling)
        for row, one in zip(rows, each, strict=True):
            drawn[row] = one
        return draw_ids(each, [contexts[row] for row in rows])

    tokens = choose_ids(processed, contexts, draw_some)
    return [None if row in failures else token for row, token in enumerate(tokens)], drawn
