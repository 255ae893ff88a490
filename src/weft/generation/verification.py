"""Accepts or replaces proposed tokens (Leviathan et al., 2023; Chen et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.generation.runners import Work
from weft.generation.sampler import (
    Choice,
    Context,
    choose,
    find_failures,
    invert,
    next_uniform,
    probabilities,
    process,
    with_logprobs,
)


def choose_tokens(
    logits: Sequence[torch.Tensor],
    contexts: Sequence[Context],
    works: Sequence[Work],
    drafts: Sequence[torch.Tensor | None],
) -> list[list[Choice]]:
    """Returns the new tokens of each sequence: its accepted proposals and one more token; none if `Work.kept` is 0.

    Proposals that were drawn at random are accepted by rejection sampling, so the new tokens have the distribution of
    the model. Each other proposal is accepted if it is the token that the model chooses, with the same random numbers
    as without proposals.

    Args:
        logits: the logits `[Work.returned, vocab]` of each sequence.
        contexts: the context of each sequence before its proposals.
        works: the work of each sequence, whose last `Work.kept` - 1 tokens are the proposals.
        drafts: the result of `Proposer.draft`.
    """
    found: list[list[Choice]] = [[] for _ in works]
    rows, all_contexts, plain = [], [], []
    for i, (work, context) in enumerate(zip(works, contexts, strict=True)):
        if not work.kept:
            continue
        proposals = work.tokens[work.end - work.kept + 1 : work.end]
        each = [context_after(context, proposals[:n]) for n in range(work.kept)]
        draft, last = drafts[i], logits[i][work.scored :]
        if draft is not None:
            found[i] = _sample_rejecting(last, each, proposals, draft.to(logits[i].device))
        else:
            random = bool(proposals) and context.sampling.temperature > 0
            plain.append((i, proposals, context.generator.get_state() if random else None))
            rows.append(last)
            all_contexts += each
    choices = iter(choose(torch.cat(rows), all_contexts) if rows else [])
    for i, proposals, state in plain:
        chosen = [next(choices) for _ in range(len(proposals) + 1)]
        wrong = (n for n, token in enumerate(proposals) if chosen[n].token != token or chosen[n].failure)
        accepted = next(wrong, len(proposals))
        found[i] = chosen[: accepted + 1]
        if state is not None:
            # The random numbers of rejected tokens are drawn again for the next tokens.
            contexts[i].generator.set_state(state)
            for _ in found[i]:
                next_uniform(contexts[i].generator)
    return found


def _sample_rejecting(
    logits: torch.Tensor, contexts: Sequence[Context], proposals: Sequence[int], draft: torch.Tensor
) -> list[Choice]:
    """Returns the accepted proposals of a sequence and one more token.

    Each proposal is accepted with probability min(1, p / q), where p is its probability in the model and q its
    probability in the draft model. After the first rejection, a token is drawn with a probability proportional to
    max(0, p - q). If all proposals are accepted, a token is drawn from p.

    Args:
        logits: the model's logits, `[proposals + 1, vocab]`.
        contexts: the context of each row of `logits`.
        draft: q, `[proposals, vocab]`.
    """
    sampling, generator = contexts[0].sampling, contexts[0].generator
    processed = process(logits, contexts)
    failures = find_failures(logits, processed)
    each = probabilities(processed, sampling)  # p
    ids = torch.tensor(proposals, device=each.device).unsqueeze(-1)
    ratios = (each[:-1].gather(-1, ids) / draft.gather(-1, ids)).flatten().tolist()
    rejected = (n for n, ratio in enumerate(ratios) if n in failures or float(next_uniform(generator)) >= ratio)
    accepted = next(rejected, len(ratios))
    tokens = list(proposals[:accepted])
    if accepted in failures:
        chosen = with_logprobs(logits[:accepted], tokens, [sampling] * accepted)
        return [*chosen, Choice(0, failure=failures[accepted])]
    weights = each[accepted]
    if accepted < len(proposals):
        rest = (weights - draft[accepted]).clamp(min=0)
        weights = rest if rest.sum() > 0 else weights  # p and q are equal, except for rounding
    tokens.append(int(draw_ids(weights.unsqueeze(0), contexts[:1])))
    return with_logprobs(logits[: accepted + 1], tokens, [sampling] * len(tokens))


def context_after(context: Context, tokens: Sequence[int]) -> Context:
    """Returns the context of a sequence after `tokens` are appended to its continuation."""
    if not tokens:
        return context
    needed = context.sampling.penalizes or context.constraint is not None
    new = [*context.new, *tokens] if needed else context.new
    return context._replace(new=new, allowed=None)


def draw_ids(weights: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
    """Returns ids `[batch]`: for each row of `weights`, an id drawn in proportion to the weights.

    Args:
        weights: weight of each id, float64 `[batch, vocab]`.
        contexts: the context of each row, whose random generator is used.
    """
    mass = weights.cumsum(-1)
    uniform = torch.stack([next_uniform(context.generator) for context in contexts]).to(mass.device)
    return invert(mass, uniform, mass[:, -1:]).squeeze(-1)
