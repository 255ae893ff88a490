"""Log-probabilities of given next tokens, without holding the logits of all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK_ELEMENTS = 1 << 22  # logits held at a time: what a CPU's cache holds
# On a CPU with a large vocabulary, adding up the head's gradient chunk by chunk costs more than the logits' memory:
# 4,096 tokens of 32,000 words take 1.2 s at once and 1.5 to 2 s in chunks; of 4,096 words 75 ms at once, 46 in chunks.
LARGE_VOCABULARY = 16384
PLAIN_ELEMENTS = 1 << 27


def cap(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Squash logits smoothly into (-softcap, softcap), as Gemma 2 does; None leaves them alone."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def token_logprobs_reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """What `token_logprobs` computes, in plain words: all logits at once."""
    logits = F.linear(hidden, weight)
    logits = cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """log softmax(cap(hidden weight'))[label] for each position.

    Args:
        hidden: `[..., width]`.
        weight: `[vocab, width]`, the output head.
        labels: `[...]`, int64.
        softcap: see `cap`.

    Returns:
        `[...]`, float32 (float64 for float64). The products are in the inputs' dtype, everything after them is not.
    """
    elements = labels.numel() * len(weight)
    if hidden.device.type == "cpu" and len(weight) > LARGE_VOCABULARY and elements <= PLAIN_ELEMENTS:
        return token_logprobs_reference(hidden, weight, labels, softcap)
    logprobs = _ChunkedLogprobs.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), softcap)
    return logprobs.view(labels.shape)


class _ChunkedLogprobs(torch.autograd.Function):
    """Rows are done a chunk at a time, in backward again: logits are cheaper to compute twice than to keep."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, softcap):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        normalizers = torch.empty_like(logprobs)  # log of the sum of exp(logits)
        for rows in _chunks(len(hidden), len(weight)):
            logits = cap(F.linear(hidden[rows], weight).to(wide), softcap)
            torch.logsumexp(logits, -1, out=normalizers[rows])
            logprobs[rows] = logits.gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1) - normalizers[rows]
        ctx.save_for_backward(hidden, weight, labels, normalizers)
        ctx.softcap = softcap
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        hidden, weight, labels, normalizers = ctx.saved_tensors
        wide, softcap = normalizers.dtype, ctx.softcap
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=wide)
        for rows in _chunks(len(hidden), len(weight)):
            logits = cap(F.linear(hidden[rows], weight).to(wide), softcap)
            slope = None if softcap is None else 1 - (logits / softcap).square_()
            scale = gradient[rows].unsqueeze(-1)
            # d logprob / d logits = onehot(label) - softmax(logits)
            of_logits = logits.sub_(normalizers[rows].unsqueeze(-1)).exp_().mul_(-scale)
            of_logits.scatter_add_(-1, labels[rows].unsqueeze(-1), scale)
            if slope is not None:
                of_logits.mul_(slope)
            of_logits = of_logits.to(hidden.dtype)
            torch.mm(of_logits, weight, out=to_hidden[rows])
            to_weight += of_logits.mT @ hidden[rows]
        return to_hidden, to_weight.to(weight.dtype), None, None


def _chunks(rows: int, vocabulary: int):
    size = max(512 if vocabulary > LARGE_VOCABULARY else 1, CHUNK_ELEMENTS // vocabulary)
    return (slice(start, start + size) for start in range(0, rows, size))
