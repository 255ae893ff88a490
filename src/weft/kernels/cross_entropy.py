"""Log-probabilities of given next tokens, without holding the logits of all of them."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from weft.kernels.autocast import as_autocast

KEPT_ELEMENTS = 1 << 27  # logits held from forward to backward at most; of more, blocks of so many are computed twice
# What is done to each logit is done to so many at a time, to stay in a CPU's second-level caches: 4,096 tokens of
# 32,000 words take 229 ms in place of 262, of 4,096 words 31 in place of 50; compiled 209 and 26 (width 384, bf16,
# 4 cores). `F.linear_cross_entropy` takes 196 and 24, with losses rounded to bfloat16: 0.06 off.
CHUNK_ELEMENTS = {"cpu": 1 << 20}


class Vocabulary(Protocol):
    """Where the head's rows are some of the vocabulary's, and other ranks have the others."""

    first: int  # the number of the head's first row

    def join(self, chosen: torch.Tensor, normalizers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token, the labels' logits added up over all ranks, and the logarithm of all sums together."""
        ...


def cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Squash logits smoothly into (-softcap, softcap), as Gemma 2 does; None leaves them alone."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def logprobs_of_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[label], in at least float32: `[..., vocab]` -> `[...]`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    softcap: float | None = None,
    *,
    compiled: bool = False,
    vocabulary: Vocabulary | None = None,
) -> torch.Tensor:
    """log softmax(cap(hidden weight'))[label] for each position.

    Args:
        hidden: `[..., width]`.
        weight: `[vocab, width]`, the output head.
        labels: `[...]`, int64.
        softcap: see `cap`.
        compiled: fuse what is done to each logit with `torch.compile`.
        vocabulary: `weight` has some rows only; then the gradient of `hidden` is theirs alone.

    Returns:
        `[...]`, float32 (float64 for float64). The products are in the inputs' dtype, everything after them is not.
    """
    flat, weight = as_autocast(hidden.reshape(-1, hidden.shape[-1]), weight)
    return _Logprobs.apply(flat, weight, labels, softcap, compiled, vocabulary)


class _Logprobs(torch.autograd.Function):
    """Logits stay in the inputs' dtype and become their own gradient; wider ones exist a few rows at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, softcap, compiled, vocabulary):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        result = torch.empty(labels.shape, dtype=wide, device=hidden.device)  # no view: FSDP2 warns of these
        logprobs, labels = result.view(-1), labels.reshape(-1)
        own = None  # which labels are among the rows that are here
        if vocabulary is not None:
            labels = labels - vocabulary.first
            own = (labels >= 0) & (labels < len(weight))
            labels = labels.where(own, 0)
        normalizers = torch.empty_like(logprobs)  # log of the sum of exp(logits)
        blocks = list(_slices(len(hidden), KEPT_ELEMENTS // len(weight)))
        normalize = _compiled(_normalize) if compiled else _normalize
        for block in blocks:
            logits = F.linear(hidden[block], weight)
            for rows in _chunks(logits, compiled):
                parts = normalize(logits[rows], labels[block][rows], softcap)
                logprobs[block][rows], normalizers[block][rows] = parts
        if vocabulary is not None and own is not None:
            chosen, normalizers = vocabulary.join((logprobs + normalizers) * own, normalizers)
            torch.sub(chosen, normalizers, out=logprobs)
        ctx.save_for_backward(hidden, weight, labels, normalizers, own)
        # Not among the saved: backward writes over them, and a second one (retain_graph) computes them again.
        ctx.kept = logits if len(blocks) == 1 else None
        ctx.softcap, ctx.compiled = softcap, compiled
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        hidden, weight, labels, normalizers, own = ctx.saved_tensors
        gradient = gradient.reshape(-1)
        of_label = gradient if own is None else gradient * own
        kept, ctx.kept = ctx.kept, None
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        blocks = list(_slices(len(hidden), KEPT_ELEMENTS // len(weight)))
        differentiate = _compiled(_differentiate) if ctx.compiled else _differentiate
        to_hidden, to_weight = torch.empty_like(hidden), None
        for block in blocks:
            logits = F.linear(hidden[block], weight) if kept is None else kept
            for rows in _chunks(logits, ctx.compiled):
                # In the logits' own place: what they were is not needed any more.
                of_tokens = (x[block][rows] for x in (labels, normalizers, gradient, of_label))
                differentiate(logits[rows], *of_tokens, ctx.softcap)
            if for_hidden:
                torch.mm(logits, weight, out=to_hidden[block])
            if not for_weight:
                continue
            part = logits.mT @ hidden[block]
            if len(blocks) > 1:  # summed in the wider dtype
                part = part.to(normalizers.dtype)
            to_weight = part if to_weight is None else to_weight.add_(part)
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        return to_hidden if for_hidden else None, to_weight, None, None, None, None


def _normalize(logits, labels, softcap):
    """The labels' log-probabilities `[rows]` and the normalizers `[rows]`."""
    logits = cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    normalizers = torch.logsumexp(logits, -1)
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normalizers, normalizers


def _differentiate(logits, labels, normalizers, gradient, of_label, softcap):
    """Put gradient x (onehot(label) - softmax(logits)) in the place of the logits `[rows, vocab]`."""
    capped = cap(logits.to(normalizers.dtype), softcap)
    result = (capped - normalizers.unsqueeze(-1)).exp_().mul_(-gradient.unsqueeze(-1))
    result.scatter_add_(-1, labels.unsqueeze(-1), of_label.unsqueeze(-1))
    if softcap is not None:
        result.mul_(1 - (capped / softcap).square())
    logits.copy_(result)


@cache
def _compiled(function):
    # A batch's last block is shorter than the others: sizes are symbols from the start, or each would be compiled anew.
    return torch.compile(function, dynamic=True)


def _chunks(logits: torch.Tensor, compiled: bool):
    held = KEPT_ELEMENTS if compiled else CHUNK_ELEMENTS.get(logits.device.type, KEPT_ELEMENTS)
    return _slices(len(logits), held // logits.shape[-1])


def _slices(rows: int, size: int):
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, rows, size))
